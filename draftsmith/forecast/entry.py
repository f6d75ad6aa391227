"""The forecast of a run: which of its drafters will pay, at which load and length.

Each stage that makes a drafter is trained on small parts of the run's data (`forecast.pilots`). Its
acceptance is extrapolated to all of the data (`forecast.curve`), and set against what a step with
drafts costs here (`forecast.worth`).
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from decode.base.artifact import write_file
from decode.base.errors import UserError
from decode.measure.evaluation import evaluate
from decode.model.loading import Target
from decode.opening.directory import open_drafter
from draftsmith.forecast.curve import acceptance_at, tokens_per_step
from draftsmith.forecast.pilots import (
    Outcome,
    Pilot,
    pilot_config,
    read_pilot,
    seconds_at,
    sizes_of,
    write_data,
)
from draftsmith.forecast.worth import StepCost, Worksite
from train.base.run_files import forecast_of
from train.data.read import Example, spread
from train.report.format_figures import format_duration
from train.run.config import RunConfig
from train.run.entry import begun
from train.run.run import Splits

QUANTILES = (0.05, 0.5, 0.95)
# The next training has twice the rows, so at most about twice the time.
NEXT_TAKES = 2.1


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


@dataclass(frozen=True)
class Cell:
    """A drafter at one load and length. pays_above: the tokens per step above which drafts pay.
    speedup: of the steps after the prompt, over plain decoding of as many rows."""

    load: int
    length: int
    pays_above: float
    speedup: Range


@dataclass(frozen=True)
class Line:
    """One drafter. drafts: how it drafts. measured: tokens per step of the trainings so far, by
    their rows. seconds: of its own training on all of the data; None: it is not trained."""

    name: str
    drafts: str
    tokens_per_step: Range
    acceptance: list[Range]
    measured: dict[int, float]
    seconds: float | None
    cells: list[Cell]


@dataclass(frozen=True)
class Forecast:
    """rows: of the whole train split. seconds: of all stages of the run but evaluations.
    spent: seconds of this forecast. notes: what was not measured, and why."""

    run: str
    rows: int
    pilots: list[int]
    seconds: float
    spent: float
    lines: list[Line]
    advice: str
    notes: list[str] = field(default_factory=list)


def forecast(
    config: RunConfig,
    *,
    minutes: float,
    loads: Sequence[int],
    lengths: Sequence[int],
    say: Callable[[str], None],
    quiet: bool = False,
) -> Forecast:
    """Train on small parts of the data for about these minutes, and say what the run will be worth.

    The small runs stay in `OUTPUT_DIR/NAME-forecast`, and so does the forecast, where the run's
    report finds it. A forecast that was stopped goes on. Raises UserError for data that are too few
    for a curve, for minutes that are too few for two trainings, and as a run does.
    """
    start = time.perf_counter()
    file = forecast_of(config.run_dir)
    with begun(config, quiet=True) as whole:
        splits, target = whole.read_data(), whole.target
        settings = config.evaluation
        judged = spread(whole.corpus(splits).asked(settings.split), settings.prompts)
        asked = whole.prompts(judged)
    total = len(splits["train"])
    sizes, pilots = sizes_of(total), list[Pilot]()
    for rows in sizes:
        if pilots:
            spent, longest = time.perf_counter() - start, NEXT_TAKES * pilots[-1].seconds
            if spent + longest > 60 * minutes:
                break
        say(f"training on {rows} of {total} rows")
        pilots.append(_pilot(config, splits, rows, file.parent, target, quiet))
        if not pilots[-1].drafters:
            raise UserError("no stage of the config makes a drafter that it evaluates")
    if len(pilots) < 2:
        taken, needed = pilots[0].seconds, pilots[0].seconds * (1 + NEXT_TAKES) / 60
        raise UserError(
            f"a training on {sizes[0]} rows took {format_duration(taken)}, so two of them need "
            f"about {needed:.0f} minutes; expected --minutes {1.5 * needed:.0f} or more (what was "
            "done is kept)"
        )
    say("measuring the costs of steps")
    site = Worksite(target, settings, _text(judged, target), loads, lengths)
    lines, notes = list[Line](), list[str]()
    for name in pilots[-1].drafters:
        measured = [(pilot.rows, pilot.drafters[name]) for pilot in pilots]
        seconds = seconds_at(total, [(rows, one.seconds) for rows, one in measured])
        line, missing = _line(name, site, measured, seconds)
        lines.append(line)
        notes += missing
    for name in settings.baselines:
        protocol = replace(settings.protocol(trained=False), timed_prompts=0)
        found = evaluate(target, open_drafter(name, target), asked, protocol).to_dict()
        if found["reached"]:
            one = [(total, Outcome.of(name, found, 1.0, 0.0))]
            line, missing = _line(name, site, one, None)
            lines.append(line)
            notes += missing
    shared = seconds_at(total, [(pilot.rows, pilot.shared_seconds) for pilot in pilots])
    result = Forecast(
        run=config.name,
        rows=total,
        pilots=[pilot.rows for pilot in pilots],
        seconds=shared + sum(line.seconds or 0.0 for line in lines),
        spent=time.perf_counter() - start,
        lines=lines,
        advice=advice(lines),
        notes=notes,
    )
    write_file(file, json.dumps(asdict(result), indent=2) + "\n")
    return result


def advice(lines: Sequence[Line]) -> str:
    """One sentence about the first load and length: what to train, or not to."""
    trained = [line for line in lines if line.seconds is not None and line.cells]
    others = [line for line in lines if line.seconds is None and line.cells]
    if not trained:
        return "no cost could be measured, so nothing is said about the speed"
    best = max(trained, key=lambda line: line.cells[0].speedup.value)
    at = best.cells[0]
    where = f"with {at.load} text{'s' * (at.load > 1)} of {at.length} tokens at a time"
    other = max(others, key=lambda line: line.cells[0].speedup.value, default=None)
    own = at.speedup
    if other is not None and (theirs := other.cells[0].speedup).low > max(own.high, 1.0):
        return f"{other.name} is enough: it needs no training and gains {theirs} {where}"
    if own.high < 1:
        return f"do not train: the best stage, {best.name}, would gain {own} {where}"
    if own.low > 1 and (other is None or own.low > other.cells[0].speedup.high):
        return f"train {best.name}: it will gain {own} {where}"
    beside = "" if other is None else f", and {other.name} gains {other.cells[0].speedup} untrained"
    return (
        f"not certain: {best.name} would gain {own} {where}{beside}; more --minutes make the "
        "interval narrower"
    )


def _pilot(
    config: RunConfig, splits: Splits, rows: int, directory: Path, target: Target, quiet: bool
) -> Pilot:
    total = len(splits["train"])
    files = write_data(splits, rows, directory / f"data-{rows}")
    settings = pilot_config(config, files, rows / total, directory / f"rows-{rows}")
    with begun(settings, quiet=quiet) as run:
        run.loaded = target
        run.execute()
        return read_pilot(run, rows, total)


def _line(
    name: str,
    site: Worksite,
    measured: Sequence[tuple[int, Outcome]],
    seconds: float | None,
) -> tuple[Line, list[str]]:
    """A drafter, and what could not be measured of it. measured: by rows, ascending. seconds: of
    its training; None: it is not trained."""
    last = measured[-1][1]
    draws = acceptance_at(1.0, [one.point for _, one in measured])
    tokens = tokens_per_step(draws)
    drafter = open_drafter(last.spec, site.target)
    depth, trained = len(last.point.reached), seconds is not None
    costs, missing = site.costs(drafter, trained=trained, depth=depth, width=last.width)
    line = Line(
        name,
        drafter.describe_drafts(site.settings.gamma),
        Range.of(tokens),
        [Range.of(place) for place in draws.T],
        {rows: one.tokens_per_step for rows, one in measured},
        seconds,
        [_cell(cost, tokens) for cost in costs],
    )
    return line, [f"{name}: {reason}" for reason in missing]


def _cell(cost: StepCost, tokens: np.ndarray) -> Cell:
    noise = np.exp(cost.noise * np.random.default_rng(1).standard_normal(len(tokens)))
    return Cell(cost.load, cost.length, cost.cost, Range.of(tokens / (cost.cost * noise)))


def _text(rows: Sequence[Example], target: Target) -> list[int]:
    """Token ids of what users wrote, for texts of any length."""
    written = "\n".join(text for row in rows for text in row.user_texts())
    return list(target.tokenizer(written, add_special_tokens=False)["input_ids"])
