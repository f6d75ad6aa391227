"""What `train --dry-run` prints: what each stage of a run trains, writes and needs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.table import Table

from decode.base.artifact import free_space, size
from decode.model.loading import Target
from decode.model.without_weights import load_shapes
from draftsmith.cli.command import table, write_json
from train.base.console import Reporter
from train.base.stage import StageMemory, StagePlan
from train.loop.estimates import read_speeds, seconds_of
from train.report.format_figures import format_duration
from train.run.config import RunConfig
from train.run.run import Run
from train.run.run_evaluation import planned_evaluation

COLUMNS = ("stage", "kind", "what", "trained", "tokens", "memory", "disk", "time")


def plan_target(settings: RunConfig) -> Target:
    """The target of a run without its weights, for a plan."""
    target = settings.target
    return load_shapes(
        target.model,
        dtype=target.dtype,
        device=target.device,
        revision=target.revision,
        trust_remote_code=target.trust_remote_code,
        chat_template_args=target.chat_template_args,
    )


@dataclass(frozen=True)
class _Entry:
    """The plan of a stage, or of all evaluations. seconds: None if the speed is not known."""

    name: str
    kind: str
    plan: StagePlan
    seconds: float | None


@dataclass(frozen=True)
class _Space:
    """memory: bytes that a process needs for the largest stage. disk, free: bytes that the run
    writes, and that the disk has. processes: how many the run will have."""

    memory: int
    disk: int
    free: int
    processes: int

    def in_words(self, sharded: bool) -> str:
        count = self.processes
        whose = f"each of {count} processes that shard" if count > 1 else "one process that shards"
        what = "only the target's layers" if sharded else "nothing"
        return (
            f"about {size(self.memory)} for the tensors of the largest stage, in {whose} {what}, "
            f"and {size(self.disk)} of disk, where {size(self.free)} are free; estimates for "
            "answers of full length"
        )


def print_plan(run: Run, reporter: Reporter, speed: str | None, json_file: Path | None) -> None:
    """Print what each stage trains, writes and needs, and then the evaluations. speed: as for
    `read_speeds`. json_file: write these figures there too."""
    if speed is None and (run.directory / "report.json").is_file():
        speed = str(run.directory)
    speeds = read_speeds(speed) if speed else {}
    examples = run.read_data()
    plans = run.plan(examples)
    named = {name: plan for name, _, plan in plans}
    whole = ("evaluation", "evaluation", planned_evaluation(run.config, named, examples))
    entries = [
        _Entry(name, kind, plan, seconds_of(name, kind, plan, speeds))
        for name, kind, plan in (*plans, whole)
    ]
    *stages, evaluation = entries
    space = _Space(
        memory=max(stage.plan.memory.total for stage in stages),
        disk=sum(stage.plan.disk_bytes for stage in stages),
        free=free_space(run.directory),
        processes=run.processes or run.accelerator.num_processes,
    )
    title = f"plan of {run.directory}"
    reporter.table(table(title, COLUMNS, map(_cells, entries), left=len(COLUMNS)))
    reporter.table(_memory_table(stages))
    reporter.say(space.in_words(run.config.target.sharded))
    reporter.say(run.precision_in_words)
    if run.accelerator.is_main_process:
        write_json(json_file, _figures(stages, evaluation, space))
    if space.disk > space.free:
        reporter.say(
            "the disk may be too small: choose another output_dir, or let stages use the live "
            "target (features: live, teacher: live) in place of caches"
        )
    reporter.say(_total_time(stages, evaluation, speeds, space.processes))


def _cells(entry: _Entry) -> Sequence[str]:
    plan = entry.plan
    return (
        entry.name,
        entry.kind,
        plan.what,
        f"{plan.trained_parameters / 1e6:.1f}M" if plan.trained_parameters else "–",
        f"{plan.tokens:,}" if plan.tokens else "–",
        f"≈ {size(plan.memory.total)}" if plan.memory.total else "–",
        f"≈ {size(plan.disk_bytes)}" if plan.disk_bytes else "–",
        f"≈ {format_duration(entry.seconds)}" if entry.seconds else "–",
    )


def _memory_table(stages: Sequence[_Entry]) -> Table:
    parts = [field.name for field in fields(StageMemory)]
    sizes = [
        (stage.name, *(size(getattr(stage.plan.memory, part)) for part in parts))
        for stage in stages
    ]
    return table("memory of a process", ("stage", *parts), sizes)


def _figures(stages: Sequence[_Entry], evaluation: _Entry, space: _Space) -> dict[str, Any]:
    """The plan as JSON values."""
    return {
        "processes": space.processes,
        "memory_bytes": space.memory,
        "disk_bytes": space.disk,
        "free_bytes": space.free,
        "stages": [
            {"name": stage.name, "kind": stage.kind, "seconds": stage.seconds}
            | {key: value for key, value in asdict(stage.plan).items() if key != "max_seconds"}
            for stage in stages
        ],
        "evaluation": {
            "what": evaluation.plan.what,
            "tokens": evaluation.plan.tokens,
            "seconds": evaluation.seconds,
        },
    }


def _total_time(
    stages: Sequence[_Entry], evaluation: _Entry, speeds: Mapping[str, float], processes: int
) -> str:
    if not speeds:
        return "no time: give --speed generate=TOKENS_PER_SECOND,… or --speed RUN_DIRECTORY"
    missing = [stage.name for stage in stages if not stage.seconds]
    if missing:
        return f"no total time: --speed says nothing about {', '.join(missing)}"
    total = sum(entry.seconds or 0 for entry in (*stages, evaluation))
    what, rest = ("stages", "loading and evaluations come")
    if evaluation.seconds:
        what, rest = ("stages and evaluations", "loading comes")
    return (
        f"about {format_duration(total)} for the {what}, {processes * total / 3600:.1f} hours of "
        f"one device; {rest} on top"
    )
