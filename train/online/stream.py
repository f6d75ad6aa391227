"""What is counted while a stream of requests is served, and the figures made of it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from decode.stats import finite

# Of a request: verification passes, tokens they emitted, positions reached, tokens accepted.
COUNTS = ("steps", "emitted", "reached", "accepted")


@dataclass
class Progress:
    """Where the stream stands; stored with every save.

    served: requests that were answered. version: of the weights that decode. counts: of every
    request, see COUNTS. batches: [requests served after it, seconds of decoding]. rounds: as
    `train.online.learning.Round`, each with the requests `served` before it. seconds: by activity,
    of the time that requests had to wait for it. online: as of `Online.state`, and buffers: [first,
    next] of both, for each rank.
    """

    ranks: int
    served: int = 0
    version: int = 0
    counts: list[list[int]] = field(default_factory=list)
    batches: list[tuple[int, float]] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    online: list[dict[str, int]] = field(default_factory=list)
    buffers: list[list[int]] = field(default_factory=list)

    def spend(self, activity: str, begin: float) -> float:
        """Add the seconds since `begin`."""
        passed = time.perf_counter() - begin
        self.seconds[activity] = self.seconds.get(activity, 0.0) + passed
        return passed

    def summary(self, window: int) -> dict[str, Any]:
        """Figures of the whole stream, and of its windows of so many requests."""
        kept = sum(entry["kept"] for entry in self.rounds)
        seconds = sum(self.seconds.values())
        emitted = sum(row[1] for row in self.counts)
        return {
            "requests": self.served,
            "acceptance_rate": finite(rate(self.counts)),
            "tokens": emitted,
            "tokens_per_second": emitted / seconds,
            "decoding_seconds": self.seconds.get("decoding", 0.0),
            "learning_seconds": self.seconds.get("learning", 0.0),
            "saving_seconds": self.seconds.get("saving", 0.0),
            "versions_kept": kept,
            "versions_rolled_back": len(self.rounds) - kept,
            "optimizer_steps": self.rounds[-1]["steps"] if self.rounds else 0,
            "windows": self.windows(window),
            "rounds": self.rounds,
        }

    def windows(self, size: int) -> list[dict[str, Any]]:
        """The stream in windows of whole batches, each of at least `size` requests but the last:
        requests from `first` on, their figures, and the seconds with learning included."""
        found, first, seconds = [], 0, 0.0
        waited = [(entry["served"], entry["waited"]) for entry in self.rounds]
        for served, spent in self.batches:
            seconds += spent + sum(s for place, s in waited if place == served)
            if served - first < size and served < self.served:
                continue
            rows = self.counts[first:served]
            steps, emitted = (sum(row[i] for row in rows) for i in (0, 1))
            found.append(
                {
                    "first": first,
                    "requests": served - first,
                    "acceptance_rate": finite(rate(rows)),
                    "tokens_per_step": emitted / steps if steps else None,
                    "tokens_per_second": emitted / seconds,
                }
            )
            first, seconds = served, 0.0
        return found


def rate(counts: Sequence[Sequence[int]]) -> float:
    """Accepted / reached over some requests."""
    reached, accepted = (sum(row[i] for row in counts) for i in (2, 3))
    return accepted / reached if reached else float("nan")
