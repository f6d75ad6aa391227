"""The forecast of a run: which of its drafters will pay, at which load and length.

Each stage that makes a drafter is trained on small parts of the run's data (`forecast.pilots`). Its
acceptance is extrapolated to all of the data (`forecast.curve`), and set against what a step with
drafts costs here (`forecast.step_costs`).
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from decode.base.artifact import write_file
from decode.base.errors import UserError
from decode.model.loading import Target
from decode.opening.directory import open_drafter
from draftsmith.forecast.answer import (
    EngineCell,
    Forecast,
    Line,
    Range,
    advice,
    engine_advice,
    losers,
)
from draftsmith.forecast.curve import acceptance_at, tokens_per_step
from draftsmith.forecast.engine_speed import ServedDrafter, measure_engines
from draftsmith.forecast.pilots import (
    FEWEST_ROWS,
    LARGEST_SHARE,
    Pilot,
    PilotResult,
    next_rows,
    pilot_config,
    read_pilot,
    seconds_at,
    write_data,
)
from draftsmith.forecast.planned_stages import kind_of
from draftsmith.forecast.step_costs import Worksite
from train.base.provenance import describe_process
from train.base.run_files import forecast_of, stage_directory
from train.data.read import Example, spread
from train.measure.evaluation import evaluate
from train.report.format_figures import format_duration, format_machine
from train.run.config import RunConfig, differences, dump_config
from train.run.entry import begun_run
from train.run.run import CONFIG, DONE, Splits

OTHER_SHARES = (0.5, 2.0)  # of the data, for which tokens per step are forecast too
# The smallest of these parts is enough that very likely loses no more tokens per step than this.
PARTS, MOST_LOST, VERY_LIKELY = (0.125, 0.25, 0.5), 0.05, 0.95


def forecast(
    config: RunConfig,
    *,
    minutes: float,
    loads: Sequence[int],
    lengths: Sequence[int],
    say: Callable[[str], None],
    quiet: bool = False,
    surface: Forecast | None = None,
    engine: str | None = None,
) -> Forecast:
    """Train on small parts of the data for about these minutes, and say what the run will be worth.

    minutes: 0: nothing is trained, and only the costs of steps are measured. surface: the forecast
    of another machine, whose costs are used. engine: servers, as `ServedDrafter.parse` reads them;
    speeds there are measured first. The small runs stay in `OUTPUT_DIR/NAME-forecast`, and
    so does the forecast, where the run's report finds it. A forecast that was stopped goes on.
    Raises UserError for a surface of another target, and as a run does.
    """
    start = time.perf_counter()
    file, settings = forecast_of(config.run_dir), config.evaluation
    with begun_run(config, quiet=True) as whole:
        splits, target = whole.read_data(), whole.target
        judged = spread(whole.corpus(splits).asked(settings.split), settings.prompts)
        asked = whole.prompts(judged)
        # A row that would end the whole run ends the forecast first.
        stages = [
            name
            for name, _, plan in whole.plan(splits)
            if plan.drafters and (settings.stages is None or name in settings.stages)
        ]
        afterwards = not _done_in(config.run_dir, config).isdisjoint(stages)
    if not stages:
        raise UserError("no stage of the config makes a drafter that it evaluates")
    about = _about(target)
    if surface is not None and surface.target != about:
        raise UserError(
            f"the target is a {about}, but that of the file of --surface a {surface.target}; make "
            "the file with the same config"
        )
    if surface is not None:
        every = [cell for line in surface.lines for cell in line.cells]
        loads = list(dict.fromkeys(cell.load for cell in every))
        lengths = list(dict.fromkeys(cell.length for cell in every))
    total, notes = len(splits["train"]), list[str]()
    there: dict[str, list[EngineCell]] = {}
    if engine is not None:
        servers = ServedDrafter.parse(engine, stages)
        say(f"asking {', '.join(server.url for server in servers)}")
        text = _text(judged, target)
        there, notes = measure_engines(servers, stages, text, loads, lengths)
    train = partial(_pilot, config, splits, directory=file.parent, target=target, quiet=quiet)
    pilots, before = list[Pilot](), time.perf_counter()
    if minutes and total * LARGEST_SHARE >= FEWEST_ROWS:
        say(f"training on {FEWEST_ROWS} of {total} rows")
        made = train(FEWEST_ROWS)
        pilots.append(made)
    else:
        say("making drafters that have learnt nothing")
        made = train(min(total, FEWEST_ROWS), bare=True)
    begun_in = time.perf_counter() - before
    say("measuring the costs of steps")
    until = start + 60 * minutes if minutes else math.inf
    site = Worksite(target, settings, _text(judged, target), loads, lengths, surface, until)
    lines = list[Line]()
    for name, outcome in made.drafters.items():
        line, missing = site.weigh(name, outcome, trained=True)
        lines.append(replace(line, engines=there.get(name, [])))
        notes += missing
    for name in settings.baselines:
        protocol = replace(settings.protocol(trained=False), timed_prompts=0)
        found = evaluate(target, open_drafter(name, target), asked, protocol).to_dict()
        if found["reached"]:
            outcome = PilotResult.of(name, found, total)
            line, missing = site.weigh(name, outcome, trained=False)
            lines.append(_judged(line, [outcome], {total: outcome.point.again()}, total))
            notes += missing
        else:
            notes.append(f"{name} drafts nothing after these prompts")
    # The trainings count as long as they took, so a forecast that goes on does the same.
    others = time.perf_counter() - start - begun_in
    if pilots:
        pilots += map(train, _finished(config, file.parent, total))
    while pilots:
        times = [(pilot.rows, pilot.seconds) for pilot in pilots]
        judging = [pilot.judging_seconds for pilot in pilots]
        left = 60 * minutes - others - sum(taken for _, taken in times) - sum(judging)
        rows = next_rows(total, times, left, judging[-1])
        if rows is None:
            break
        say(f"training on {rows} of {total} rows")
        pilots.append(train(rows))
    if pilots:
        lines = _after_training(lines, pilots, config, total)
        shared = seconds_at(total, [(pilot.rows, pilot.shared_seconds) for pilot in pilots])
    here = format_machine(describe_process()["machine"])
    result = Forecast(
        run=config.name,
        target=about,
        machine=here if surface is None else surface.machine,
        elsewhere=surface is not None,
        rows=total,
        pilots=[pilot.rows for pilot in pilots],
        seconds=shared + sum(line.seconds or 0.0 for line in lines) if pilots else None,
        spent=time.perf_counter() - start,
        lines=lines,
        advice=advice(lines, total, narrower=bool(pilots) and _can_grow(pilots, total)),
        notes=notes + _curve_notes(pilots, total, minutes) + losers(lines) + engine_advice(lines),
        afterwards=afterwards,
    )
    if pilots or not file.is_file():  # costs alone are no forecast that a report shows
        write_file(file, json.dumps(asdict(result), indent=2) + "\n")
    return result


def _finished(config: RunConfig, directory: Path, total: int) -> list[int]:
    """The rows of the larger small trainings that an earlier forecast finished, ascending. total:
    rows of the whole train split."""
    sizes = [int(place.name.removeprefix("rows-")) for place in directory.glob("rows-*")]
    return sorted(
        rows
        for rows in sizes
        if FEWEST_ROWS < rows <= total * LARGEST_SHARE
        and len(_done_in(directory / f"rows-{rows}", config)) == len(config.stages)
    )


def _done_in(run: Path, config: RunConfig) -> set[str]:
    """The stages of a config that are done in the directory of a run."""
    return {
        stage.name
        for number, stage in enumerate(config.stages)
        if (stage_directory(run, stage.name, number) / DONE).is_file()
    }


def _can_grow(pilots: Sequence[Pilot], total: int) -> bool:
    """Whether a larger small training can be had, with more time."""
    return 2 * pilots[-1].rows <= total * LARGEST_SHARE


def _curve_notes(pilots: Sequence[Pilot], total: int, minutes: float) -> list[str]:
    """Why there are fewer than two trainings, and what to do."""
    if len(pilots) > 1 or not minutes:
        return []
    rows = math.ceil(2 * FEWEST_ROWS / LARGEST_SHARE)
    if total < rows:
        had = f"one training, on {pilots[0].rows} of them," if pilots else "no training"
        return [
            f"the train split has {total} rows, so {had} was tried: a curve needs {rows}; train on "
            "all of them, which takes little time"
        ]
    taken = pilots[0].seconds + pilots[0].judging_seconds
    return [
        f"one training took {format_duration(taken)}, and no second one fitted into --minutes: the "
        f"interval is narrower with --minutes {math.ceil((minutes * 60 + 2.1 * taken) / 60)} or "
        "more, which go on from here"
    ]


def _pilot(
    config: RunConfig,
    splits: Splits,
    rows: int,
    *,
    directory: Path,
    target: Target,
    quiet: bool,
    bare: bool = False,
) -> Pilot:
    total, name = len(splits["train"]), "untrained" if bare else str(rows)
    files = write_data(splits, rows, directory / f"data-{name}")
    place = directory / (name if bare else f"rows-{rows}")
    settings = pilot_config(config, files, rows / total, place, bare=bare)
    more = _has_other_stages(settings)
    with begun_run(settings, quiet=quiet, allow_changes=more) as run:
        run.loaded = target
        run.execute()
        return read_pilot(run, rows)


def _has_other_stages(config: RunConfig) -> bool:
    """Whether the run began with other stages than now, and what it has of today's stages was made
    with the same settings: then a forecast with more kinds, or fewer, keeps it."""
    if not (file := config.run_dir / CONFIG).is_file():
        return False
    old, new = json.loads(file.read_text("utf-8")), dump_config(config)
    begun = {stage["name"]: stage for stage in old["stages"]}
    for number, stage in enumerate(config.stages):
        directory = stage_directory(config.run_dir, stage.name, number)
        if stage.name not in begun and directory.exists():  # of a forecast before the last one
            done = directory / DONE
            record = json.loads(done.read_text("utf-8")) if done.is_file() else {}
            begun[stage.name] = record.get("settings")
    kept = [stage for stage in new["stages"] if stage["name"] in begun]
    for values, stages in ((old, [begun[stage["name"]] for stage in kept]), (new, kept)):
        values["stages"] = stages
        values["evaluation"]["stages"] = None
    return not differences(old, new)


def _after_training(
    lines: Sequence[Line], pilots: Sequence[Pilot], config: RunConfig, total: int
) -> list[Line]:
    """The lines, those of the stages with what they accept after all of the data. total: its
    rows."""
    measured = {
        line.name: [pilot.drafters[line.name] for pilot in pilots] for line in lines if line.trained
    }
    kinds = {stage.name: kind_of(stage) for stage in config.stages}
    sizes = [total, *(round(share * total) for share in (*OTHER_SHARES, *PARTS))]
    draws = acceptance_at(
        sizes,
        {name: (kinds[name], [one.point for one in found]) for name, found in measured.items()},
    )
    return [
        _judged(line, found, dict(zip(sizes, draws[line.name], strict=True)), total)
        if (found := measured.get(line.name))
        else line
        for line in lines
    ]


def _judged(
    line: Line, measured: Sequence[PilotResult], draws: Mapping[int, np.ndarray], total: int
) -> Line:
    """The line with what the drafter accepts after all of the data. measured: by rows, ascending.
    draws: of the acceptance by place, [N, D], by rows. total: rows of all of the data."""
    tokens = {rows: tokens_per_step(one) for rows, one in draws.items()}
    line = replace(
        line,
        tokens_per_step=Range.of(tokens[total]),
        acceptance=[Range.of(place) for place in draws[total].T],
        measured={one.point.rows: one.tokens_per_step for one in measured},
        cells=[cell.judged(tokens[total]) for cell in line.cells],
        engines=[cell.judged(draws[total]) for cell in line.engines],
    )
    if not line.trained:
        return line
    others = [round(share * total) for share in OTHER_SHARES]
    return replace(
        line,
        with_rows={rows: Range.of(tokens[rows]) for rows in others},
        seconds=seconds_at(total, [(one.point.rows, one.seconds) for one in measured]),
        enough=_enough(tokens, total),
    )


def _enough(tokens: Mapping[int, np.ndarray], total: int) -> int:
    """The rows that should do. tokens: per step, draws by rows; each draw is one curve."""
    for share in PARTS:
        rows = round(share * total)
        if np.quantile(tokens[rows] / tokens[total], 1 - VERY_LIKELY) >= 1 - MOST_LOST:
            return rows
    return total


def _text(rows: Sequence[Example], target: Target) -> list[int]:
    """Token ids of what users wrote, for texts of any length."""
    written = "\n".join(text for row in rows for text in row.user_texts())
    return list(target.tokenizer(written, add_special_tokens=False)["input_ids"])


def _about(target: Target) -> str:
    """The target's family and size: the same on every machine."""
    weights = sum(weight.numel() for weight in target.model.parameters())
    return f"{target.model.config.model_type} of {weights:,} weights"
