"""`compare`: two or more runs side by side."""

import json
from pathlib import Path
from typing import Annotated

import typer

from draftsmith.cli.command import shows_errors, table


@shows_errors
def compare(
    runs: Annotated[list[Path], typer.Argument(help="directories of runs, or their report.json")],
    html_file: Annotated[
        Path | None, typer.Option("--html", help="write a page with plots here")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write all figures and the settings here")
    ] = None,
) -> None:
    """Compare finished runs: their drafters with intervals, plots, and the settings that differ."""
    from rich.text import Text

    from decode.base.artifact import write_file
    from train.base.console import Reporter
    from train.report.compare_runs import (
        read_runs,
        render_comparison,
        settings_table,
    )
    from train.report.drafter_table import drafter_table

    compared = read_runs(runs)
    reporter = Reporter()
    for run, report in compared.reports.items():
        reporter.table(drafter_table(report | {"name": run}))
    columns, settings = settings_table(compared)
    # Names in a run may look like markup.
    cells = [[Text(cell) for cell in row] for row in settings]
    reporter.table(table("settings that differ", columns, cells, left=len(columns)))
    for line in (*compared.cautions, compared.verdict):
        if line:
            reporter.say(line)
    if html_file:
        write_file(html_file, render_comparison(compared).encode("utf-8", "replace"))
    if json_file:
        write_file(json_file, json.dumps(compared.to_dict(), indent=2, allow_nan=False) + "\n")
