"""Where a learner stands: one JSON file, written completely or not at all after every step."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from decode.base.artifact import write_file
from decode.base.errors import UserError
from train.engines.counters import DraftCounts

STATE_FILE = "state.json"
Step = Literal["wait", "collect", "train", "judge", "export", "start", "switch", "drain", "watch"]


class RateWindow(BaseModel):
    """Accepted ÷ drafted of the serving engine over its traffic, in windows of drafted tokens.

    begin: the counters where the current window began. first, newest: the rates of the first window
    since a swap, and of the newest complete one."""

    begin: DraftCounts | None = None
    first: float | None = None
    newest: float | None = None

    def add(self, counts: DraftCounts, size: int) -> None:
        """Take a reading of the counters."""
        if self.begin is None or counts.drafted < self.begin.drafted:
            self.begin = counts
        passed = counts - self.begin
        if passed.drafted >= size:
            self.begin, self.newest = counts, passed.rate
            self.first = self.newest if self.first is None else self.first

    def rate(self, counts: DraftCounts) -> float | None:
        """Of the newest window, or of the current one if none is complete. counts: a reading."""
        if self.newest is not None or self.begin is None:
            return self.newest
        return (counts - self.begin).rate


class BestSoFar(BaseModel):
    """The version whose first window had the highest rate so far."""

    version: int
    rate: float


class Swap(BaseModel):
    """A change from one version's engine to another's. back: it undoes an earlier one. url: the url
    of the new engine. before: accepted ÷ drafted of the old engine. begin: the new engine's
    counters at the switch. time: the time of the switch, in seconds since 1970. starts: the starts
    of the new engine."""

    old: int
    new: int
    back: bool = False
    url: str = ""
    old_url: str = ""
    before: float | None = None
    begin: DraftCounts = DraftCounts()
    time: float = 0.0
    starts: int = 0


class CycleOutcome(BaseModel):
    """How a cycle ended. serving, candidate: draft efficiency on the held-out records; gain: the
    interval of its difference, see `training_run.Gain`. before,
    after: accepted ÷ drafted in the engines. kept: whether the new version serves."""

    version: int
    kept: bool
    reason: str
    records: int
    held_out: int
    serving: float | None = None
    candidate: float | None = None
    gain: tuple[float, float] | None = None
    before: float | None = None
    after: float | None = None
    time: float = 0.0


class LearnState(BaseModel):
    """serving: the version that answers; 0: the first drafter. step: the next to do. cycle: the
    current one, as far as it is known. newest: time of the newest record of the last cycle. best:
    among all versions that served; None: no window is complete yet. models: the names of the target
    in answers, as the engine lists them; None: it was not asked yet."""

    serving: int = 0
    versions: int = 0
    step: Step = "wait"
    newest: float = 0.0
    cycle: CycleOutcome | None = None
    cycle_newest: float = 0.0
    swap: Swap | None = None
    window: RateWindow = RateWindow()
    best: BestSoFar | None = None
    models: list[str] | None = None
    history: list[CycleOutcome] = []

    def read(self, counts: DraftCounts, size: int) -> None:
        """Take a reading of the serving engine's counters. size: of a window, in drafted tokens."""
        self.window.add(counts, size)
        rate = self.window.first
        if rate is not None and (self.best is None or rate > self.best.rate):
            self.best = BestSoFar(version=self.serving, rate=rate)

    @property
    def drop(self) -> float:
        """How far the newest window is below the best version's first one. So small losses from
        version to version add up."""
        if self.best is None or self.window.newest is None:
            return 0.0
        return self.best.rate - self.window.newest

    @classmethod
    def load(cls, directory: Path) -> "LearnState":
        """The state in a directory, or a new one. Raises UserError for a file that holds no
        state."""
        file = directory / STATE_FILE
        try:
            return cls.model_validate_json(file.read_bytes())
        except FileNotFoundError:
            return cls()
        except (OSError, ValidationError) as error:
            raise UserError(
                f"{file} cannot be read ({error}); restore it, or choose another directory"
            ) from None

    def save(self, directory: Path) -> None:
        """Write the state. UserError on OSError."""
        write_file(directory / STATE_FILE, self.model_dump_json(indent=1))
