"""`train`: run the stages of a config."""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from decode.errors import UserError
from train.cli.command import cores, quieten, shows_errors, table
from train.config_file import read_config
from train.exit_status import ExitStatus

if TYPE_CHECKING:
    from accelerate import Accelerator

    from decode.target.loading import Target
    from train.config import RunConfig


@shows_errors
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
            help="for --dry-run, tokens a second: KIND=NUMBER,… by kind or name of stage, or the "
            "directory of a run that measured them; default: this run's, if it has a report"
        ),
    ] = None,
    allow_changes: Annotated[
        bool,
        typer.Option(
            "--allow-changes",
            help="continue a run although its settings or its number of ranks changed",
        ),
    ] = False,
) -> None:
    """Run the stages of a config. An existing run continues where it stopped.

    `accelerate launch -m train CONFIG` is the same on several processes. SIGTERM and Ctrl-C stop
    training after a checkpoint, with exit status 143.
    """
    source = read_config(config, overrides or [])  # before anything heavy is imported
    if speed is not None and not dry_run:
        raise UserError("--speed is for --dry-run; give both, or leave it out")

    from train.config import build_config
    from train.console import Reporter
    from train.run import Run
    from train.training.checkpoint import Stopped

    settings = build_config(source)
    quieten()
    require_trackers(settings.trackers)
    accelerator = start_accelerator(settings)
    reporter = Reporter(silent=not accelerator.is_main_process)
    run = Run(settings, accelerator, reporter, allow_changes)
    try:
        if dry_run:
            run.loaded = plan_target(settings)
            print_plan(run, reporter, speed)
            return
        report = run.execute()
        if accelerator.is_main_process:
            print_report(run, report)
    except Stopped as stopped:
        reporter.say(f"{stopped}; run the same command again to continue")
        raise typer.Exit(ExitStatus.STOPPED) from None
    finally:
        accelerator.end_training()


def require_trackers(trackers: Sequence[str]) -> None:
    """Raise UserError for a tracker that is not installed: accelerate would leave it out without a
    word. The default one, tensorboard, may be missing."""
    for name in trackers:
        if name not in ("all", "tensorboard") and find_spec(name) is None:
            raise UserError(
                f"trackers names {name}, which is not installed; run pip install {name}, or leave "
                "it out"
            )


def start_accelerator(settings: "RunConfig") -> "Accelerator":
    """This process's part of the launched engine, with its threads set."""
    import torch

    from train.training import parallel

    accelerator = parallel.start(
        # accelerate would choose Apple's mps, which targets do not use (`decode.target.loading`).
        cpu=settings.target.device == "cpu" or torch.backends.mps.is_available(),
        mixed_precision=settings.precision,
        log_with=settings.trackers or None,
        project_dir=str(settings.run_dir / "logs"),
    )
    if accelerator.device.type == "cpu":
        share = max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        torch.set_num_threads(settings.threads or share)
    return accelerator


def plan_target(settings: "RunConfig") -> "Target":
    """The target of a run without its weights, for a plan."""
    from decode.target.without_weights import load_shapes

    target = settings.target
    return load_shapes(
        target.model,
        dtype=target.dtype,
        device=target.device,
        revision=target.revision,
        trust_remote_code=target.trust_remote_code,
    )


def print_plan(run: Any, reporter: Any, speed: str | None) -> None:
    """Print the resolved config's stages, and what each trains, writes and needs."""
    from train.report.format_figures import format_duration
    from train.training.estimates import read_speeds, seconds_of

    if speed is None and (run.directory / "report.json").is_file():
        speed = str(run.directory)
    speeds = read_speeds(speed) if speed else {}
    plans = run.plan()
    times = [seconds_of(name, kind, plan, speeds) for name, kind, plan in plans]
    columns = ("stage", "kind", "what", "trained", "tokens", "memory", "disk", "time")
    rows = [
        (
            name,
            kind,
            plan.what,
            f"{plan.trained_parameters / 1e6:.1f}M" if plan.trained_parameters else "–",
            f"{plan.tokens:,}" if plan.tokens else "–",
            f"≈ {plan.memory_bytes / 2**30:.1f} GiB" if plan.memory_bytes else "–",
            f"≈ {plan.disk_bytes / 2**30:.2f} GiB" if plan.disk_bytes else "–",
            f"≈ {format_duration(seconds)}" if seconds else "–",
        )
        for (name, kind, plan), seconds in zip(plans, times, strict=True)
    ]
    reporter.table(table(f"plan of {run.directory}", columns, rows, left=len(columns)))
    memory, disk = (
        max(plan.memory_bytes for _, _, plan in plans),
        sum(plan.disk_bytes for _, _, plan in plans),
    )
    reporter.say(
        f"about {memory / 2**30:.1f} GiB for the tensors of the largest stage, in one process that "
        f"shards nothing, and {disk / 2**30:.1f} GiB of disk; estimates for answers of full length"
    )
    if not speeds:
        reporter.say("no time: give --speed generate=TOKENS_PER_SECOND,… or --speed RUN_DIRECTORY")


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
