"""What a forecast says: figures with their intervals, and one sentence."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from decode.base.errors import UserError
from decode.costs import Costs
from draftsmith.forecast.curve import tokens_per_step

QUANTILES = (0.05, 0.5, 0.95)
# A drafter is named if it is slower than plain decoding with so many of the curves.
MAY_LOSE = 0.3


@dataclass(frozen=True)
class Range:
    """A forecast figure, with the ends of its 90% interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, draws: np.ndarray) -> "Range":
        low, value, high = np.quantile(draws, QUANTILES).tolist()
        return cls(value, low, high)

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def where(load: int, length: int) -> str:
    """A load and a length, in words."""
    return f"with {load} text{'s' * (load > 1)} of {length} tokens at a time"


@dataclass(frozen=True)
class Cell:
    """A drafter at one load and length: rows that are decoded together, and tokens of each before
    the step. pays_above: the cost of a step in plain steps of as many rows, so the tokens per step
    above which drafts pay. speedup: of the steps after the prompt, over plain decoding of as many
    rows. slower: how likely it is below 1. Both are None if no acceptance is known."""

    load: int
    length: int
    pays_above: float
    costs: Costs
    speedup: Range | None = None
    slower: float | None = None

    @property
    def where(self) -> str:
        return where(self.load, self.length)

    def judged(self, tokens: np.ndarray) -> "Cell":
        """With the speed-up for draws of the tokens per step, float64 [N]."""
        normal = np.random.default_rng(1).standard_normal(len(tokens))
        gains = tokens / (self.pays_above * np.exp(self.costs.noise * normal))
        return replace(self, speedup=Range.of(gains), slower=float((gains < 1).mean()))


@dataclass(frozen=True)
class Speed:
    """Tokens a second of all requests, at a number of tokens per step. noise: its relative standard
    error."""

    tokens_per_step: float
    speed: float
    noise: float


@dataclass(frozen=True)
class EngineCell:
    """A drafter in a user's engine, at one load and length. drafted: tokens of a draft. speeds:
    with simulated acceptance, ascending. plain: tokens a second without a drafter; None: no server
    had none. speed: tokens a second at the forecast acceptance; None: it is not known."""

    load: int
    length: int
    engine: str
    drafted: int
    speeds: tuple[Speed, ...]
    plain: float | None
    speed: Range | None = None
    speedup: Range | None = None

    def step(self, tokens: np.ndarray | float) -> np.ndarray:
        """Seconds of a step at these tokens per step: between two speeds on a line, and beyond the
        last one as there."""
        seconds = [self.load * x.tokens_per_step / x.speed for x in self.speeds]
        return np.asarray(np.interp(tokens, [x.tokens_per_step for x in self.speeds], seconds))

    @property
    def pays_above(self) -> float | None:
        """The tokens per step above which drafts pay. None: the plain speed is not known."""
        if self.plain is None:
            return None
        tokens = 1.0
        for _ in range(100):  # the costs of a step depend little on what is accepted
            tokens = float(self.step(tokens)) * self.plain / self.load
        return tokens

    def judged(self, acceptance: np.ndarray) -> "EngineCell":
        """With what the drafter would gain, for draws of its acceptance by place, [N, D]. It stays
        unknown if the engine drafts more tokens than D."""
        if self.drafted > acceptance.shape[1]:
            return self
        tokens = tokens_per_step(acceptance[:, : self.drafted])
        normal = np.random.default_rng(1).standard_normal(len(tokens))
        noise = np.exp(max(x.noise for x in self.speeds) * normal)
        speeds = self.load * tokens / self.step(tokens) * noise
        gain = None if self.plain is None else Range.of(speeds / self.plain)
        return replace(self, speed=Range.of(speeds), speedup=gain)


@dataclass(frozen=True)
class Line:
    """One drafter. drafts: how it drafts. tokens_per_step: None if no acceptance is known; then
    acceptance, by place, is empty. measured: tokens per step of the trainings so far, by their
    rows. with_rows: what they would be with other numbers of rows. seconds: of its own training on
    all of the data; None: not known, or it is not trained. engines: in the user's engine. enough:
    rows that should do; None: not known, or it is not trained."""

    name: str
    trained: bool
    drafts: str
    tokens_per_step: Range | None
    acceptance: list[Range]
    measured: dict[int, float]
    with_rows: dict[int, Range]
    seconds: float | None
    cells: list[Cell]
    engines: list[EngineCell] = field(default_factory=list)
    enough: int | None = None


@dataclass(frozen=True)
class Forecast:
    """rows: of the whole train split. pilots: rows of the small trainings. seconds: of all stages
    of the run but evaluations; None: nothing was trained. spent: seconds of this forecast. target:
    its family and size. machine: where the costs were measured. elsewhere: that is another
    machine. notes: what was not measured, and why. afterwards: the run had trained a drafter
    before."""

    run: str
    target: str
    machine: str
    elsewhere: bool
    rows: int
    pilots: list[int]
    seconds: float | None
    spent: float
    lines: list[Line]
    advice: str
    notes: list[str] = field(default_factory=list)
    afterwards: bool = False

    def cells_of(self, name: str) -> list[Cell]:
        """Those of the drafter with this name; none if there is none."""
        return next((line.cells for line in self.lines if line.name == name), [])


def read_forecast(file: Path) -> Forecast:
    """What `draftsmith forecast --json FILE` wrote. Raises UserError if it cannot be read."""
    expected = "expected what `draftsmith forecast --json FILE` of this version wrote"
    try:
        found = TypeAdapter(Forecast).validate_json(file.read_bytes())
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); {expected}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{file}: {place}: {first['msg']}; {expected}") from error
    for line in found.lines:
        for cell in line.cells:
            costs = cell.costs
            values = [costs.step_s, costs.per_depth, costs.noise, costs.fixed, *costs.v]
            if not costs.v or len(costs.v) != len(costs.widths) or not np.isfinite(values).all():
                raise UserError(
                    f"{file}: costs of {line.name}, {cell.load} × {cell.length}, are {costs}: they "
                    f"are no figures; {expected}"
                )
    return found


def advice(lines: Sequence[Line], rows: int, *, narrower: bool = True) -> str:
    """One sentence about the first load and length: what to train, or not to. rows: of all data.
    narrower: a larger small training can be had."""
    weighed = [(line, line.cells[0]) for line in lines if line.cells]
    if not weighed:
        return "no cost could be measured, so nothing is said about the speed"
    place = weighed[0][1].where
    gains = [(at.speedup, line) for line, at in weighed if at.speedup is not None]
    trained = [(own, line) for own, line in gains if line.trained]
    others = [(own, line.name) for own, line in gains if not line.trained]
    if not trained:
        each = ", ".join(f"{line.name} above {at.pays_above:.2f}" for line, at in weighed)
        return f"not known, as nothing was trained; {place}, drafts pay so: {each} tokens per step"
    own, chosen = max(trained, key=lambda one: one[0].value)
    best, enough = chosen.name, chosen.enough or rows
    theirs, other = max(others, key=lambda one: one[0].value, default=(None, ""))
    if theirs is not None and theirs.low > max(own.high, 1.0):
        return f"{other} is enough: it needs no training and gains {theirs} {place}"
    if own.high < 1:
        return f"do not train: the best stage, {best}, would gain {own} {place}"
    if own.low > 1 and (theirs is None or own.low > theirs.high):
        amount = f"{enough} of {rows}" if enough < rows else f"all {rows}"
        return f"train {best}, with {amount} rows: it will gain {own} {place}"
    beside = "" if theirs is None else f", and {other} gains {theirs} untrained"
    more = "; more --minutes make the interval narrower" if narrower else ""
    return f"not certain: {best} would gain {own} {place}{beside}{more}"


def losers(lines: Sequence[Line]) -> list[str]:
    """A sentence that names the drafters that may well lose, at the first load and length."""
    lose = {
        f"{line.name} ({cell.slower:.0%})": cell.where
        for line in lines
        for cell in line.cells[:1]
        if cell.slower is not None and cell.slower >= MAY_LOSE
    }
    if not lose:
        return []
    place = next(iter(lose.values()))
    return [f"how likely drafters are slower than plain decoding {place}: {', '.join(lose)}"]


def engine_advice(lines: Sequence[Line]) -> list[str]:
    """A sentence about each drafter in the user's engine, at the first load and length."""
    found = []
    for line, at in [(line, line.engines[0]) for line in lines if line.engines]:
        said = f"in {at.engine}, {line.name}"
        if at.pays_above is not None:
            said += f" pays above {at.pays_above:.2f} tokens per step"
        if at.speedup is not None:
            said += f", and would gain {at.speedup}"
        elif at.speed is not None:
            said += f" would write {at.speed} tokens a second"
        elif line.acceptance:
            said += (
                f" drafts {at.drafted} tokens, but acceptance is forecast for "
                f"{len(line.acceptance)}: set evaluation.gamma to {at.drafted}"
            )
        found.append(f"{said} {where(at.load, at.length)}")
    return found
