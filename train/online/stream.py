"""The counts of a served stream of requests, and the figures computed from them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from decode.stats import finite

# For each request: verification passes, emitted tokens, positions reached, accepted tokens.
COUNTS = ("steps", "emitted", "reached", "accepted")


@dataclass
class StreamProgress:
    """The progress of a stream; stored with every save.

    served: the number of answered requests. version: of the decoding weights. counts: for every
    request, see COUNTS. batches: [requests served so far, seconds of decoding] for each batch.
    rounds: as `train.online.learning.Round`, each with the number of requests `served` before it.
    seconds: by activity, the time that requests waited for it. online: `Online.state` of each rank.
    buffers: [first, next] of both buffers, for each rank.
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
        """Add the seconds since `begin` to an activity, and return them."""
        passed = time.perf_counter() - begin
        self.seconds[activity] = self.seconds.get(activity, 0.0) + passed
        return passed

    def summary(self, window: int) -> dict[str, Any]:
        """Figures of the stream so far, and of its windows of `window` requests."""
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
        """Figures of the stream's windows. A window has complete batches, with at least `size`
        requests in total (the last may have fewer), beginning with request `first`. Speeds include
        the time spent learning."""
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
    """The acceptance rate, accepted / reached, over some requests."""
    reached, accepted = (sum(row[i] for row in counts) for i in (2, 3))
    return accepted / reached if reached else float("nan")
