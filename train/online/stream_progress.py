"""The files that an online stage writes while it runs, so that a kill costs only time.

versions/version-N/    a drafter directory with the optimizer's moments beside it
progress/progress-R/   the stream's progress at the R-th save, and the version
history.jsonl          the stream's windows and rounds
buffer/…, held-out/…   the replay buffers' shards (`distill.replay.replay_buffer`)

A version and the buffers' new shards are written before the progress that names them. What a kept
progress names is never deleted: there are two, for the case that the newest is damaged. Without
background learning everything is a function of the stream, so work lost to a kill is repeated
identically. With it, timing decides which version drafts a request, so the repeated work may
differ.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from decode.base.artifact import (
    ReadFailure,
    newest_complete,
    numbers_of,
    recover,
    remove_directory,
    write_directory,
)
from decode.base.errors import UserError
from decode.model.loading import Target
from decode.opening.directory import describe_drafter, save_drafter
from decode.stats import finite
from distill.replay.online_student import OnlineStudent
from train.base.console import Reporter
from train.online.learning import Online

# For each request: verification passes, emitted tokens, positions reached, accepted tokens.
COUNTS = ("steps", "emitted", "reached", "accepted")


@dataclass
class RequestWindow:
    """Complete batches of requests one after the other. first: its first request. counts: see
    COUNTS, of each of its requests. seconds: the seconds of decoding them, and of learning that
    they waited for."""

    first: int = 0
    counts: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0

    def figures(self, requests: int) -> dict[str, Any]:
        """requests: the number of its requests."""
        steps, emitted, *_ = sums = summed(self.counts)
        return {
            "first": self.first,
            "requests": requests,
            "counts": self.counts,
            "acceptance_rate": finite(rate(sums)),
            "tokens_per_step": emitted / steps if steps else None,
            "tokens_per_second": emitted / self.seconds,
        }


@dataclass
class StreamProgress:
    """The progress of a stream; stored with every save. Its size does not grow with the stream.

    served: the number of answered requests. version: the version of the decoding weights. totals:
    see COUNTS, over all requests. window: the current one. rounds: the newest ones, as
    `train.online.learning.LearningRound`, each with the number of requests `served` before it.
    seconds: by activity, the time that requests waited for it. logged: the bytes of the history
    that belong to this progress. online: `Online.state` of each rank. buffers: [first, next] of
    both buffers, for each rank.
    """

    ranks: int
    served: int = 0
    version: int = 0
    totals: list[int] = field(default_factory=lambda: [0] * len(COUNTS))
    window: RequestWindow = field(default_factory=RequestWindow)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    logged: int = 0
    online: list[dict[str, int]] = field(default_factory=list)
    buffers: list[list[int]] = field(default_factory=list)

    @classmethod
    def read(cls, values: dict[str, Any]) -> "StreamProgress":
        """The progress from its stored values."""
        # Earlier versions stored the counts of each request: they become a part of one window.
        counts, batches = values.pop("counts", []), values.pop("batches", [])
        window = RequestWindow(**values.get("window", {}))
        if window.counts and isinstance(window.counts[0], int):  # then those of a window
            window.counts = [window.counts]
        progress = cls(**values | {"window": window})
        if counts:
            progress.served = 0
            progress.add(counts, sum(seconds for _, seconds in batches))
        return progress

    def add(self, counts: Sequence[Sequence[int]], seconds: float) -> None:
        """Count a batch of requests and the seconds of its decoding."""
        self.totals = summed([self.totals, *counts])
        self.window.counts += map(list, counts)
        self.window.seconds += seconds
        self.served += len(counts)

    def close_window(self, size: int, *, ending: bool) -> dict[str, Any] | None:
        """The figures of the current window, and begin the next one. None if the window has fewer
        than `size` requests and the stream is not `ending`."""
        requests = self.served - self.window.first
        if not requests or (requests < size and not ending):
            return None
        closed, self.window = self.window, RequestWindow(self.served)
        return closed.figures(requests)

    def spend(self, activity: str, begin: float) -> float:
        """Add the seconds since `begin` to an activity, and return them."""
        passed = time.perf_counter() - begin
        self.seconds[activity] = self.seconds.get(activity, 0.0) + passed
        return passed

    def summary(self, history: "History") -> dict[str, Any]:
        """Figures of the stream so far, with all its windows and rounds."""
        rounds = history.read("round")
        # The counts of each request stay in the history: a stream may be long.
        windows = [
            {k: v for k, v in entry.items() if k != "counts"} for entry in history.read("window")
        ]
        kept = sum(entry["kept"] for entry in rounds)
        emitted = self.totals[1]
        return {
            "requests": self.served,
            "acceptance_rate": finite(rate(self.totals)),
            "tokens": emitted,
            "tokens_per_second": emitted / sum(self.seconds.values()),
            "decoding_seconds": self.seconds.get("decoding", 0.0),
            "learning_seconds": self.seconds.get("learning", 0.0),
            "saving_seconds": self.seconds.get("saving", 0.0),
            "versions_kept": kept,
            "versions_rolled_back": len(rounds) - kept,
            "optimizer_steps": rounds[-1]["steps"] if rounds else 0,
            "windows": windows,
            "rounds": rounds,
        }


def summed(counts: Sequence[Sequence[int]]) -> list[int]:
    """The sums of COUNTS over some requests, at least one."""
    return [sum(column) for column in zip(*counts, strict=True)]


def rate(counts: Sequence[int]) -> float:
    """The acceptance rate, accepted / reached, from sums of COUNTS."""
    _, _, reached, accepted = counts
    return accepted / reached if reached else float("nan")


class History:
    """The windows and rounds of a stream, a line each in one file, which only grows. One process
    writes it. What a kill left behind the saved progress is cut off."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def append(self, kind: str, entry: dict[str, Any]) -> None:
        """kind: window or round."""
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({kind: entry}) + "\n")

    def size(self) -> int:
        """Flush the file to disk; its bytes."""
        with self.file.open("a", encoding="utf-8") as lines:
            os.fsync(lines.fileno())
            return lines.tell()

    def cut(self, size: int) -> None:
        """Go on after the first `size` bytes."""
        with self.file.open("a", encoding="utf-8") as lines:
            lines.truncate(size)

    def read(self, kind: str) -> list[dict[str, Any]]:
        entries = map(json.loads, self.file.read_text(encoding="utf-8").splitlines())
        return [entry[kind] for entry in entries if kind in entry]


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

    def recover(self, *, alone: bool = False) -> None:
        """Clean up after a process that was killed while writing. alone: see
        `decode.base.artifact.recover`."""
        recover(self.versions, alone=alone)
        recover(self.saves, alone=alone)

    def path(self, version: int) -> Path:
        return self.versions / f"{VERSION}-{version}"

    def save_version(
        self,
        progress: StreamProgress,
        student: OnlineStudent,
        online: Online | None,
        provenance: dict[str, Any],
    ) -> None:
        """Write the student's weights as the drafter directory of version `progress.version`.

        online: has the optimizer's moments; None: nothing is learnt. provenance: without the
        progress.
        """
        moments = {} if online is None else online.moments()
        provenance = provenance | {
            "served": progress.served,
            "version": progress.version,
            "round": progress.rounds[-1] if progress.rounds else None,
        }

        def write(directory: Path) -> None:
            student.write(directory)
            save_file(
                {k: v.detach().cpu().contiguous() for k, v in moments.items()}, directory / MOMENTS
            )

        save_drafter(
            self.path(progress.version),
            student.kind,
            write,
            target=self.target,
            provenance=provenance,
        )

    def save_progress(self, progress: StreamProgress) -> list[list[int]]:
        """Write the stream's progress. Then delete versions that no kept progress needs. Returns
        `buffers` of the oldest kept progress, with which each rank calls `Online.forget`."""
        self._saved = number = self._saved + 1
        state = json.dumps(asdict(progress))
        write_directory(
            self.saves / f"{PROGRESS}-{number}",
            lambda directory: (directory / STATE).write_text(state, encoding="utf-8"),
            meta={"number": number},
        )
        numbers = numbers_of(self.saves, PROGRESS)
        for old in numbers[:-KEEP]:
            remove_directory(self.saves / f"{PROGRESS}-{old}")
        needed = set(numbers_of(self.versions, VERSION)[-self.keep :])
        kept = [
            json.loads((self.saves / f"{PROGRESS}-{number}" / STATE).read_text(encoding="utf-8"))
            for number in numbers[-KEEP:]
        ]
        needed |= {stored["version"] for stored in kept}
        for old in numbers_of(self.versions, VERSION):
            if old not in needed:
                remove_directory(self.path(old))
        return StreamProgress.read(kept[0]).buffers

    def resume(self, online: Online, progress: StreamProgress, rank: int = 0) -> None:
        """Have `online` go on after a save, whose weights its student has."""
        if rank < len(progress.online):
            lost = online.restore(self.target, progress.buffers[rank])
            if lost:
                self.reporter.say(f"  {lost} records of the replay buffers are missing on disk")
        if progress.online:
            state = progress.online[min(rank, len(progress.online) - 1)]
            moments = load_file(self.path(progress.version) / MOMENTS)
            online.resume(state, moments)

    def load(self) -> StreamProgress | None:
        """The newest complete save with a complete version, or None if nothing was saved yet.
        Damaged saves are skipped and reported. Later saves continue the numbers of this one.

        Raises UserError if all saves are damaged, or if the disk does not read one.
        """
        newest, skipped = newest_complete(self.saves, PROGRESS)
        damaged: list[UserError] = [*skipped]
        progress = None
        while newest is not None and progress is None:
            stored = StreamProgress.read(json.loads((newest / STATE).read_text(encoding="utf-8")))
            number = int(newest.name.rpartition("-")[2])
            try:
                describe_drafter(self.path(stored.version))
                progress, self._saved = stored, number
            except ReadFailure:
                raise
            except UserError as error:
                damaged.append(error)
                older = [n for n in numbers_of(self.saves, PROGRESS) if n < number]
                newest = self.saves / f"{PROGRESS}-{older[-1]}" if older else None
        for problem in damaged:
            self.reporter.say(f"  skipping a damaged save: {problem}")
        if damaged and progress is None:
            raise UserError(
                f"no save in {self.saves.parent} is complete; delete that directory to serve the "
                "stream from the beginning"
            )
        return progress
