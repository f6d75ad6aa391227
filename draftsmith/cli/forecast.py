"""`forecast`: what the drafters of a config will be worth, before they are trained."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decode.base.errors import UserError
from draftsmith.cli.command import (
    numbers,
    require_packages,
    says_stops,
    table,
    write_json,
)
from draftsmith.forecast.planned_stages import read_with_kinds
from train.base.console import quieten
from train.run.parsed_config import parse_config

if TYPE_CHECKING:
    from rich.table import Table

    from draftsmith.forecast.answer import Line

LOADS, LENGTHS = "1,8", "256"


def forecast(
    config: Annotated[Path, typer.Argument(help="a run config (YAML)")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value …")] = None,
    kinds: Annotated[
        str | None,
        typer.Option(help="also forecast these, such as small_lm,medusa,eagle1, with defaults"),
    ] = None,
    minutes: Annotated[
        float, typer.Option(help="of the forecast; 0: only costs, of drafters that learnt nothing")
    ] = 15.0,
    load: Annotated[
        str | None, typer.Option(help=f"texts that are written at a time; else {LOADS}")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help=f"tokens of a text, such as 512,8k; else {LENGTHS}")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="[STAGE=]URL,… of servers with simulated acceptance, and one without a drafter"
        ),
    ] = None,
    surface: Annotated[
        Path | None,
        typer.Option(help="costs of another machine: its --json of the same config"),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write it here too")] = None,
) -> None:
    """Say what the drafters of a config will be worth, before they are trained: each is trained on
    small parts of the data, and its acceptance is extrapolated to all of it.

    The run's report later shows the forecast beside what came out.
    """
    # Before anything heavy is imported.
    source, planned = read_with_kinds(config, overrides or [], kinds.split(",") if kinds else [])
    parse_config(source, files=True)
    if surface is not None and (load or lengths):
        raise UserError("--surface has the loads and lengths of its file; leave out the others")
    loads, sizes = _positive(load or LOADS, "--load"), _positive(lengths or LENGTHS, "--lengths")
    if engine is not None:
        require_packages("httpx2")
    if not 0 <= minutes < math.inf:
        raise UserError(f"--minutes is {minutes}; expected 0 or more")
    from draftsmith.forecast.answer import read_forecast

    known = None if surface is None else read_forecast(surface)
    from draftsmith.forecast.entry import forecast as run
    from train.base.console import Reporter
    from train.report.format_figures import format_duration
    from train.run.config_checks import build_config

    quieten()
    reporter = Reporter()
    for said in planned:
        reporter.say(said)
    with says_stops(reporter.say):
        found = run(
            build_config(source),
            minutes=minutes,
            loads=loads,
            lengths=sizes,
            say=reporter.say,
            surface=known,
            engine=engine,
        )

    def cells(line: "Line") -> list[list[str]]:
        took = "–" if line.seconds is None else format_duration(line.seconds)
        drafter = [line.name, line.drafts, str(line.tokens_per_step or "–")]
        costs = [
            [f"{at.load} × {at.length}", f"{at.pays_above:.2f}", str(at.speedup or "–")]
            for at in line.cells
        ]
        return [[*drafter, *cost, took] for cost in costs or [["–"] * 3]]

    columns = ("drafter", "drafts", "tokens/step", "texts × tokens", "pays above", "speed-up")
    rows = [row for line in found.lines for row in cells(line)]
    trained = ", ".join(map(str, found.pilots)) or "none"
    title = f"forecast of {found.run}: trained on {trained} of {found.rows} rows"
    caption = "90% intervals; speed-up of the steps after the prompt"
    reporter.table(table(title, (*columns, "training"), rows, left=2, caption=caption))
    if any(line.engines for line in found.lines):
        reporter.table(_engine_table(found.lines))
    for line in found.lines:
        if line.with_rows:
            others = ", ".join(f"{rate} with {n} rows" for n, rate in line.with_rows.items())
            reporter.say(f"{line.name}, tokens per step: {others}")
    for note in found.notes:
        reporter.say(note)
    if found.elsewhere:
        reporter.say(f"the costs are those of another machine: {found.machine}")
    took = f"this forecast took {format_duration(found.spent)}"
    if found.seconds is not None:
        whole = format_duration(found.seconds)
        took = f"the whole run would take {whole} here, without evaluations; {took}"
    reporter.say(took)
    reporter.say(found.advice)
    write_json(json_file, asdict(found))


def _engine_table(lines: "Sequence[Line]") -> "Table":
    """What the drafters would be worth in the user's engine."""

    def cells(line: "Line") -> Iterator[list[str]]:
        for at in line.engines:
            measured = ", ".join(f"{x.speed:.1f} at {x.tokens_per_step:.2f}" for x in at.speeds)
            yield [
                line.name,
                at.engine,
                f"{at.load} × {at.length}",
                measured,
                "–" if at.plain is None else f"{at.plain:.1f}",
                "–" if at.pays_above is None else f"{at.pays_above:.2f}",
                str(at.speed or "–"),
                str(at.speedup or "–"),
            ]

    columns = ("drafter", "engine", "texts × tokens", "measured", "plain", "pays above")
    rows = [row for line in lines for row in cells(line)]
    title = "in the engine: tokens a second, at tokens per step"
    return table(title, (*columns, "forecast", "speed-up"), rows, left=2)


def _positive(text: str, option: str) -> list[int]:
    found = numbers(re.sub(r"(\d)k\b", r"\g<1>000", text), option, int)
    if min(found) < 1:
        raise UserError(f"{option} is {text}; expected whole numbers above 0")
    return found
