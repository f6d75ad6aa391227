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
    def bar(self, what: str, total: int) -> Iterator["Bar"]:
        """A progress bar over `total` units."""
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
            yield Bar(self, progress, what, total, log=not terminal)


class Bar:
    """One progress bar; `update(done, note)` moves it."""

    def __init__(
        self, reporter: Reporter, progress: Progress, what: str, total: int, *, log: bool
    ) -> None:
        self._reporter, self._progress, self._log = reporter, progress, log
        self._what, self._total = what, total
        self._task = progress.add_task(what, total=total, note="")
        self._said = -LOG_EVERY_SECONDS
        self._first: tuple[float, int] | None = None  # time and units of the first update

    def update(self, done: int, note: str = "", what: str | None = None) -> None:
        """Show `done` of the total units. `what` renames the bar; `note` appears after it."""
        self._what = what or self._what
        self._progress.update(self._task, completed=done, note=note, description=self._what)
        left = self._note(done, note)
        now = self._progress.get_time()
        if self._log and (now - self._said >= LOG_EVERY_SECONDS or done == self._total):
            self._said = now
            words = f"  {self._what}: {done}/{self._total} {note}".rstrip()
            self._reporter.say(f"{words}, {max(1, round(left / 60))} min left" if left else words)

    def resize(self, total: int) -> None:
        """Change the total number of units."""
        self._total = total
        self._progress.update(self._task, total=total)

    def _note(self, done: int, note: str) -> float | None:
        """Write progress.json. Returns the seconds that are left; None: not known yet."""
        now = time.time()
        if self._first is None or done < self._first[1]:
            self._first = now, done
        began, before = self._first
        speed = (done - before) / (now - began) if now > began else 0.0
        left = (self._total - done) / speed if speed > 0 else None
        self._reporter.note_progress(
            {
                "what": self._what,
                "done": done,
                "total": self._total,
                "note": note,
                "time": now,
                "seconds_left": left,
            },
            last=done == self._total,
        )
        return left


def quieten() -> None:
    """Silence messages of libraries that users can do nothing about."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # At every checkpoint of a tied model, accelerate reports that it stores the tied weight once.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
