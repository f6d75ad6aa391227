"""The files that an online stage writes while it runs, so that a kill costs only time.

versions/version-N/    a drafter directory with the optimizer's moments beside it
progress/progress-R/   the stream's progress at the R-th save, and the version
buffer/…, held-out/…   the replay buffers' shards (`distill.replay.replay_buffer`)

A version is written before the progress that names it. Files that an older progress needs are
deleted only after a newer progress is in place. Without background learning everything is a
function of the stream, so work lost to a kill is repeated identically. With it, timing decides
which version drafts a request, so the repeated work may differ.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.artifact import (
    newest_complete,
    numbers_of,
    recover,
    remove_directory,
    write_directory,
)
from decode.drafters.directory import describe_drafter, save_drafter
from decode.errors import UserError
from decode.stats import finite
from decode.target.loading import Target
from distill.replay.online_student import OnlineStudent
from train.console import Reporter

# For each request: verification passes, emitted tokens, positions reached, accepted tokens.
COUNTS = ("steps", "emitted", "reached", "accepted")


@dataclass
class StreamProgress:
    """The progress of a stream; stored with every save.

    served: the number of answered requests. version: the version of the decoding weights. counts:
    see COUNTS, for every request. batches: [requests served so far, seconds of decoding] for each
    batch.
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
        windows, first, seconds = [], 0, 0.0
        waited = [(entry["served"], entry["waited"]) for entry in self.rounds]
        for served, spent in self.batches:
            seconds += spent + sum(s for when, s in waited if when == served)
            if served - first < size and served < self.served:
                continue
            rows = self.counts[first:served]
            steps, emitted = (sum(row[i] for row in rows) for i in (0, 1))
            windows.append(
                {
                    "first": first,
                    "requests": served - first,
                    "acceptance_rate": finite(rate(rows)),
                    "tokens_per_step": emitted / steps if steps else None,
                    "tokens_per_second": emitted / seconds,
                }
            )
            first, seconds = served, 0.0
        return windows


def rate(counts: Sequence[Sequence[int]]) -> float:
    """The acceptance rate, accepted / reached, over some requests."""
    reached, accepted = (sum(row[i] for row in counts) for i in (2, 3))
    return accepted / reached if reached else float("nan")


VERSION, PROGRESS = "version", "progress"
MOMENTS, STATE = "moments.safetensors", "progress.json"
# Two: if the newest is damaged, one is left.
KEEP = 2


class Versions:
    """The versions and the progress in a stage's directory. Only one process writes them."""

    def __init__(self, directory: Path, target: Target, reporter: Reporter, *, keep: int) -> None:
        self.versions, self.saves = directory / "versions", directory / "progress"
        self.target, self.reporter, self.keep = target, reporter, keep
        self._saved = 0  # the number of the newest save

    def recover(self) -> None:
        """Clean up after a process that was killed while writing."""
        recover(self.versions)
        recover(self.saves)

    def path(self, version: int) -> Path:
        return self.versions / f"{VERSION}-{version}"

    def save_version(
        self,
        version: int,
        student: OnlineStudent,
        moments: dict[str, Tensor],
        provenance: dict[str, Any],
    ) -> None:
        """Write the student's weights as a drafter directory."""

        def write(directory: Path) -> None:
            student.write(directory)
            save_file(
                {k: v.detach().cpu().contiguous() for k, v in moments.items()}, directory / MOMENTS
            )

        save_drafter(
            self.path(version), student.kind, write, target=self.target, provenance=provenance
        )

    def save_progress(self, progress: StreamProgress) -> None:
        """Write the stream's progress. Then delete versions that no kept progress needs."""
        self._saved = number = self._saved + 1

        def fill(directory: Path) -> None:
            (directory / STATE).write_text(json.dumps(asdict(progress)))

        write_directory(self.saves / f"{PROGRESS}-{number}", fill, meta={"number": number})
        numbers = numbers_of(self.saves, PROGRESS)
        for old in numbers[:-KEEP]:
            remove_directory(self.saves / f"{PROGRESS}-{old}")
        needed = set(numbers_of(self.versions, VERSION)[-self.keep :])
        for kept in numbers[-KEEP:]:
            state = self.saves / f"{PROGRESS}-{kept}" / STATE
            needed.add(json.loads(state.read_text())["version"])
        for old in numbers_of(self.versions, VERSION):
            if old not in needed:
                remove_directory(self.path(old))

    def load(self) -> StreamProgress | None:
        """The newest complete save with a complete version, or None if nothing was saved yet.
        Damaged saves are skipped and reported. Later saves continue the numbers of this one.

        Raises UserError if all saves are damaged.
        """
        newest, damaged = newest_complete(self.saves, PROGRESS)
        while newest is not None:
            progress = StreamProgress(**json.loads((newest / STATE).read_text()))
            number = int(newest.name.rpartition("-")[2])
            try:
                describe_drafter(self.path(progress.version))
            except UserError as error:
                damaged.append(error)  # type: ignore[arg-type]  # only reported
                older = [n for n in numbers_of(self.saves, PROGRESS) if n < number]
                newest = self.saves / f"{PROGRESS}-{older[-1]}" if older else None
                continue
            self._say(damaged)
            self._saved = number
            return progress
        self._say(damaged)
        if damaged:
            raise UserError(
                f"no save in {self.saves.parent} is complete; delete that directory to serve the "
                "stream from the beginning"
            )
        return None

    def _say(self, damaged: list[Any]) -> None:
        for error in damaged:
            self.reporter.say(f"  skipping a damaged save: {error}")

    def moments(self, version: int) -> dict[str, Tensor]:
        return load_file(self.path(version) / MOMENTS)
