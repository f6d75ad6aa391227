"""`train`: run the stages of a config."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from decode.errors import UserError
from train.cli.command import shows_errors, table
from train.config_file import read_config
from train.exit_status import ExitStatus

if TYPE_CHECKING:
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
            help="profile so many steps of each training, after the first ones: a trace and the "
            "slowest operations in the stage's profile/",
        ),
    ] = None,
) -> None:
    """Run the stages of a config. An existing run continues where it stopped.

    `accelerate launch -m train CONFIG` is the same on several processes. SIGTERM and Ctrl-C stop
    training after a checkpoint, with exit status 143.
    """
    source = read_config(config, overrides or [])  # before anything heavy is imported
    for option, value in (("--speed", speed), ("--processes", processes), ("--json", json_file)):
        if value is not None and not dry_run:
            raise UserError(f"{option} is for --dry-run; give both, or leave it out")
    if profile is not None and dry_run:
        raise UserError("--profile measures a training, and --dry-run has none; leave one out")

    from train.config import build_config
    from train.entry import begun
    from train.training.checkpoint import Stopped

    settings = build_config(source)
    with begun(settings, allow_changes=allow_changes) as run:
        if dry_run:
            run.loaded, run.processes = plan_target(settings), processes
            print_plan(run, run.reporter, speed, json_file)
            return
        run.profile_steps = profile
        try:
            report = run.execute()
        except Stopped as stopped:
            run.reporter.say(f"{stopped}; run the same command again to continue")
            raise typer.Exit(ExitStatus.STOPPED) from None
        if run.accelerator.is_main_process:
            print_report(run, report)


@shows_errors
def verify_cache(
    directory: Annotated[Path, typer.Argument(help="of a teacher_cache or feature_cache stage")],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write the number of parts here")
    ] = None,
) -> None:
    """Hash all files of a cache, also those that did not change since they were hashed."""
    from decode.artifact import write_file
    from train.training.open_caches import check_directory

    count = check_directory(directory, "cache", again=True)
    typer.echo(f"{directory}: {count} parts, all sound")
    if json_file:
        write_file(json_file, json.dumps({"directory": str(directory), "parts": count}, indent=2))


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
        chat_template_args=target.chat_template_args,
    )


def print_plan(run: Any, reporter: Any, speed: str | None, json_file: Path | None) -> None:
    """Print the resolved config's stages, and what each trains, writes and needs; then the
    evaluations. json_file: write these figures there too."""
    from decode.artifact import free_space, write_file
    from train.report.format_figures import format_duration
    from train.run_evaluation import planned_evaluation
    from train.stage import Memory
    from train.training.estimates import read_speeds, seconds_of

    if speed is None and (run.directory / "report.json").is_file():
        speed = str(run.directory)
    speeds = read_speeds(speed) if speed else {}
    examples = run.read_data()
    plans = run.plan(examples)
    evaluated = run.config.evaluation.stages
    judged = [plan for name, _, plan in plans if evaluated is None or name in evaluated]
    evaluation = ("evaluation", "evaluation", planned_evaluation(run.config, judged, examples))
    entries = [*plans, evaluation]
    *times, evaluating = (seconds_of(name, kind, plan, speeds) for name, kind, plan in entries)
    columns = ("stage", "kind", "what", "trained", "tokens", "memory", "disk", "time")
    rows = [
        (
            name,
            kind,
            plan.what,
            f"{plan.trained_parameters / 1e6:.1f}M" if plan.trained_parameters else "–",
            f"{plan.tokens:,}" if plan.tokens else "–",
            f"≈ {plan.memory.total / 2**30:.1f} GiB" if plan.memory.total else "–",
            f"≈ {plan.disk_bytes / 2**30:.2f} GiB" if plan.disk_bytes else "–",
            f"≈ {format_duration(seconds)}" if seconds else "–",
        )
        for (name, kind, plan), seconds in zip(entries, (*times, evaluating), strict=True)
    ]
    reporter.table(table(f"plan of {run.directory}", columns, rows, left=len(columns)))
    parts = [field.name for field in fields(Memory)]
    sizes = [
        (name, *(f"{getattr(plan.memory, part) / 2**30:.2f}" for part in parts))
        for name, _, plan in plans
    ]
    reporter.table(table("memory of a process, in GiB", ("stage", *parts), sizes))
    memory, disk = (
        max(plan.memory.total for _, _, plan in plans),
        sum(plan.disk_bytes for _, _, plan in plans),
    )
    count, free = run.processes or run.accelerator.num_processes, free_space(run.directory)
    whose = f"each of {count} processes that shard" if count > 1 else "one process that shards"
    what = "only the target's layers" if run.config.target.sharded else "nothing"
    reporter.say(
        f"about {memory / 2**30:.1f} GiB for the tensors of the largest stage, in {whose} {what}, "
        f"and {disk / 2**30:.1f} GiB of disk, where {free / 2**30:.1f} GiB are free; estimates for "
        "answers of full length"
    )
    if json_file is not None and run.accelerator.is_main_process:
        stages = [
            {"name": name, "kind": kind, "seconds": time}
            | {key: value for key, value in asdict(plan).items() if key != "max_seconds"}
            for (name, kind, plan), time in zip(plans, times, strict=True)
        ]
        figures = {
            "processes": count,
            "memory_bytes": memory,
            "disk_bytes": disk,
            "free_bytes": free,
            "stages": stages,
            "evaluation": {
                "what": evaluation[2].what,
                "tokens": evaluation[2].tokens,
                "seconds": evaluating,
            },
        }
        write_file(json_file, json.dumps(figures, indent=2))
    if disk > free:
        reporter.say(
            "the disk may be too small: choose another output_dir, or let stages use the live "
            "target (features: live, teacher: live) in place of caches"
        )
    missing = [name for (name, _, plan), time in zip(plans, times, strict=True) if not time]
    if not speeds:
        reporter.say("no time: give --speed generate=TOKENS_PER_SECOND,… or --speed RUN_DIRECTORY")
    elif missing:
        reporter.say(f"no total time: --speed says nothing about {', '.join(missing)}")
    else:
        total = sum(seconds for seconds in (*times, evaluating) if seconds)
        what, rest = ("stages", "loading and evaluations come")
        if evaluating:
            what, rest = ("stages and evaluations", "loading comes")
        reporter.say(
            f"about {format_duration(total)} for the {what}, {count * total / 3600:.1f} hours of "
            f"one device; {rest} on top"
        )


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
