"""Output on the console during a run: lines and progress bars, from the main process only. The
same in files, for programs that follow the run."""

import json
import logging
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from decode.base.artifact import write_file
from decode.base.errors import UserError
from train.base.time_left import TimeLeft
from train.base.tracking.curve_file import CURVES_FILE, CurveWriter

LOG_FILE, PROGRESS_FILE = "log.txt", "progress.json"
JOURNAL_EVERY_SECONDS = 1.0
LOG_EVERY_SECONDS = 15.0
LOG_WIDTH = 140


class Reporter:
    """Prints from the main process. Other ranks get a silent reporter.

    On a terminal, progress is a bar. In a log file it is a line every LOG_EVERY_SECONDS: progress
    stays visible, and the log does not fill up with redrawn bars.
    """

    def __init__(self, *, silent: bool = False) -> None:
        self.console = Console(quiet=silent, highlight=False)
        if not self.console.is_terminal:
            self.console.width = LOG_WIDTH
        self._journal: Path | None = None
        self._curves: CurveWriter | None = None
        self._written = -JOURNAL_EVERY_SECONDS
        self.time_left = TimeLeft(())  # of no run

    def follow(self, directory: Path) -> None:
        """From now on, also append every line to log.txt in this directory and every figure to
        curves.jsonl, and write progress.json there, at most once in JOURNAL_EVERY_SECONDS."""
        self._journal = directory
        self._curves = CurveWriter(directory / CURVES_FILE)

    def say(self, text: str) -> None:
        """Print one line without wrapping it at the console's width, so paths stay in one piece."""
        self.console.print(text, markup=False, soft_wrap=True)
        if self._journal is not None:
            moment = time.strftime("%Y-%m-%d %H:%M:%S")
            path = self._journal / LOG_FILE
            # A run does not end because this cannot be written.
            with suppress(OSError), path.open("a", encoding="utf-8", errors="replace") as log:
                log.write(f"{moment} {text}\n")

    def note_progress(self, progress: dict[str, Any], *, last: bool) -> None:
        """Write progress.json, if a run is followed. last: also shortly after the last time."""
        now = time.monotonic()
        if self._journal is None or not (last or now - self._written >= JOURNAL_EVERY_SECONDS):
            return
        self._written = now
        with suppress(UserError):
            write_file(self._journal / PROGRESS_FILE, json.dumps(progress))

    def continue_figures(self, stage: str, step: int) -> None:
        """A stage goes on after this step. What was logged for its later steps does not count."""
        if self._curves is not None:
            with suppress(OSError):
                self._curves.continue_after(stage, step)

    def log_figures(self, stage: str, step: int, figures: Mapping[str, float]) -> int:
        """Log figures at a step of a stage, if a run is followed. Returns the step's number in the
        run, or `step` itself if none is followed."""
        if self._curves is not None:
            with suppress(OSError):
                return self._curves.append(stage, step, figures)
        return step

    def table(self, table: Table) -> None:
        """Print a table, up to LOG_WIDTH columns wide if there is no terminal to fit it into."""
        self.console.print(table)

    @contextmanager
    def bar(self, what: str, total: int, *, whole: bool = True) -> Iterator["Bar"]:
        """A progress bar over `total` units. whole: they are all the work of a part of the run."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        terminal = self.console.is_terminal
        with Progress(*columns, console=self.console, disable=not terminal) as progress:
            yield Bar(self, progress, what, total, whole=whole, log=not terminal)


class Bar:
    """One progress bar; `update(done, note)` moves it."""

    def __init__(
        self,
        reporter: Reporter,
        progress: Progress,
        what: str,
        total: int,
        *,
        whole: bool,
        log: bool,
    ) -> None:
        self._reporter, self._progress, self._log = reporter, progress, log
        self._whole = whole
        self._what, self._total = what, total
        self._task = progress.add_task(what, total=total, note="")
        self._said = -LOG_EVERY_SECONDS
        self._first: tuple[float, int] | None = None  # time and units of the first update

    def update(self, done: int, note: str = "", what: str | None = None) -> None:
        """Show `done` of the total units. `what` renames the bar; `note` appears after it."""
        self._what = what or self._what
        left, of_run = self._note(done, note)
        run = f"about {_minutes(of_run)} min left of the run" if of_run else ""
        shown = ", ".join(filter(None, (note, run)))
        self._progress.update(self._task, completed=done, note=shown, description=self._what)
        now = self._progress.get_time()
        if self._log and (now - self._said >= LOG_EVERY_SECONDS or done == self._total):
            self._said = now
            words = f"  {self._what}: {done}/{self._total} {note}".rstrip()
            here = f"{_minutes(left)} min left" if left else ""
            self._reporter.say(", ".join(filter(None, (words, here, run))))

    def resize(self, total: int) -> None:
        """Change the total number of units."""
        self._total = total
        self._progress.update(self._task, total=total)

    def _note(self, done: int, note: str) -> tuple[float | None, float | None]:
        """Write progress.json. Returns the seconds that are left, and those of the run; None: not
        known yet."""
        now = time.time()
        if self._first is None or done < self._first[1]:
            self._first = now, done
        began, before = self._first
        speed = (done - before) / (now - began) if now > began else 0.0
        left = (self._total - done) / speed if speed > 0 else None
        share = 1 - before / max(1, self._total)
        of_run = self._reporter.time_left.seconds(left if self._whole else None, share)
        self._reporter.note_progress(
            {
                "what": self._what,
                "done": done,
                "total": self._total,
                "note": note,
                "time": now,
                "seconds_left": left,
                "run_seconds_left": of_run,
            },
            last=done == self._total,
        )
        return left, of_run


def _minutes(seconds: float) -> int:
    return max(1, round(seconds / 60))


def quieten() -> None:
    """Silence messages of libraries that users can do nothing about."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # At every checkpoint of a tied model, accelerate reports that it stores the tied weight once.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
