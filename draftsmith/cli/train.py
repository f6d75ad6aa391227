"""`train`: run the stages of a config. `watch` follows a run, `compare` sets runs side by side."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from decode.base.errors import UserError
from draftsmith.cli.command import require_packages, says_stops, table, write_json
from train.base.config_file import read_config
from train.run.parsed_config import parse_config


def train(
    config: Annotated[Path, typer.Argument(help="a run config (YAML)")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value …")] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="print the resolved plan and stop; reads no weights of the target"
        ),
    ] = False,
    speed: Annotated[
        str | None,
        typer.Option(
            help="for --dry-run, tokens a second: KIND=NUMBER,… by kind or name of stage, or "
            "`evaluation`; or the directory of a run that measured them; default: this run's, if "
            "it has a report"
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="for --dry-run, the number of processes that the run will have; default: 1, or "
            "those that are launched",
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="for --dry-run, write the plan's figures here")
    ] = None,
    allow_changes: Annotated[
        bool,
        typer.Option(
            "--allow-changes",
            help="continue a run although its settings or its number of ranks changed",
        ),
    ] = False,
    profile: Annotated[
        int | None,
        typer.Option(
            "--profile",
            min=1,
            metavar="STEPS",
            help="profile this many steps of a training, after the first ones: a trace and the "
            "slowest operations in the stage's profile/",
        ),
    ] = None,
) -> None:
    """Run the stages of a config. An existing run continues where it stopped.

    `accelerate launch -m train CONFIG` is the same on several processes. SIGTERM and Ctrl-C stop
    training after a checkpoint, with exit status 143.
    """
    source = read_config(config, overrides or [])
    parse_config(source, files=True)  # before anything heavy is imported
    for option, value in (("--speed", speed), ("--processes", processes), ("--json", json_file)):
        if value is not None and not dry_run:
            raise UserError(f"{option} is for --dry-run; give both, or leave it out")
    if profile is not None and dry_run:
        raise UserError("--profile measures a training, and --dry-run has none; leave one out")

    from train.run.config_checks import build_config
    from train.run.entry import begun_run

    settings = build_config(source)
    if settings.engine is not None:
        from draftsmith.export.readable import require_readable

        require_readable(settings)
    with begun_run(settings, allow_changes=allow_changes) as run:
        for note in source.notes:
            run.reporter.say(note)
        if dry_run:
            from draftsmith.cli.plan import plan_target, print_plan

            run.loaded, run.processes = plan_target(settings), processes
            print_plan(run, run.reporter, speed, json_file)
            return
        run.profile_steps = profile
        with says_stops(run.reporter.say):
            report = run.execute()
        if run.accelerator.is_main_process:
            print_report(run, report)


def verify_cache(
    directory: Annotated[Path, typer.Argument(help="of a teacher_cache or feature_cache stage")],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write the number of parts here")
    ] = None,
) -> None:
    """Hash all files of a cache, also those that did not change since they were hashed."""
    from train.loop.open_caches import check_cache_directory

    count = check_cache_directory(directory, "cache", again=True)
    typer.echo(f"{directory}: {count} parts, all sound")
    write_json(json_file, {"directory": str(directory), "parts": count})


def watch(
    run: Annotated[Path, typer.Argument(help="the directory of a run")],
    port: Annotated[int, typer.Option(help="0: any that is free")] = 8001,
) -> None:
    """Follow a run on a page of this machine: stage, time left, curves, acceptance, log. Reads the
    run's files and changes nothing. Ctrl-C ends it, not the run."""
    require_packages("starlette", "uvicorn")
    from draftsmith.net.listen import bind
    from draftsmith.watch.run_state import RunState
    from draftsmith.watch.watch_server import HOST, WatchServer

    state = RunState(run)
    with bind(HOST, port) as bound:
        address = f"http://{HOST}:{bound.getsockname()[1]}/"
        WatchServer(state, lambda: typer.echo(f"{run} is at {address}")).run(sockets=[bound])


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
    from train.report.compare_runs import read_runs, render_comparison, settings_table
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


def print_report(run: Any, report: dict[str, Any]) -> None:
    """Print the table of all drafters, the comparison of the best ones, the footnotes, and the path
    of the report."""
    from train.report.drafter_table import drafter_table
    from train.report.report_summary import comparison, footnotes, headline

    run.reporter.table(drafter_table(report))
    if best := headline(report):
        run.reporter.say(comparison(best))
        if best["ranking"]:
            run.reporter.say(best["ranking"])
    for line in footnotes(report):
        run.reporter.say(line)
    run.reporter.say(f"report: {run.directory / 'report.html'}")
