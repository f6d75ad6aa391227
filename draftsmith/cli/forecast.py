"""`forecast`: what the drafters of a config will be worth, before they are trained."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from decode.base.errors import UserError
from draftsmith.cli.command import numbers, require_writable, table, write_json
from train.base.config_file import read_config
from train.base.console import quieten
from train.run.config import parse_config


def forecast(
    config: Annotated[Path, typer.Argument(help="a run config (YAML)")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value …")] = None,
    minutes: Annotated[float, typer.Option(help="for all small trainings together")] = 15.0,
    load: Annotated[str, typer.Option(help="texts that are written at a time")] = "1,8",
    lengths: Annotated[str, typer.Option(help="tokens of a text")] = "256",
    json_file: Annotated[Path | None, typer.Option("--json", help="write it here too")] = None,
) -> None:
    """Say what the drafters of a config will be worth, before they are trained: each is trained on
    small parts of the data, and its acceptance is extrapolated to all of it.

    The run's report later shows the forecast beside what came out.
    """
    require_writable(json_file)
    source = read_config(config, overrides or [])
    parse_config(source)  # before anything heavy is imported
    loads, sizes = _positive(load, "--load"), _positive(lengths, "--lengths")
    if not minutes > 0:
        raise UserError(f"--minutes is {minutes}; expected a number above 0")
    from draftsmith.forecast.entry import Line
    from draftsmith.forecast.entry import forecast as run
    from train.base.console import Reporter
    from train.report.format_figures import format_duration
    from train.run.config_checks import build_config

    quieten()
    reporter = Reporter()
    found = run(build_config(source), minutes=minutes, loads=loads, lengths=sizes, say=reporter.say)

    def cells(line: Line) -> list[list[str]]:
        shared = [line.name, line.drafts, str(line.tokens_per_step)]
        took = "–" if line.seconds is None else format_duration(line.seconds)
        return [
            [*shared, f"{at.load} × {at.length}", f"{at.pays_above:.2f}", str(at.speedup), took]
            for at in line.cells
        ]

    columns = ("drafter", "drafts", "tokens/step", "texts × tokens", "pays above", "speed-up")
    rows = [row for line in found.lines for row in cells(line)]
    trained = ", ".join(map(str, found.pilots))
    title = f"forecast of {found.run}: trained on {trained} of {found.rows} rows"
    caption = "90% intervals; speed-up of the steps after the prompt"
    reporter.table(table(title, (*columns, "training"), rows, left=2, caption=caption))
    for note in found.notes:
        reporter.say(note)
    reporter.say(
        f"the whole run would take {format_duration(found.seconds)} without evaluations; this "
        f"forecast took {format_duration(found.spent)}"
    )
    reporter.say(found.advice)
    write_json(json_file, asdict(found))


def _positive(text: str, option: str) -> list[int]:
    found = numbers(text, option, int)
    if min(found) < 1:
        raise UserError(f"{option} is {text}; expected whole numbers above 0")
    return found
