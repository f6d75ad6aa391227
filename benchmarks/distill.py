"""Compares distillation with TRL's: throughput and peak memory.

    python -m benchmarks.distill [--quick] [--json FILE] [--precision fp32|bf16]

Runs on the CPU. All contestants train the same student (the first layers of the target with its
full vocabulary) on the same texts for one epoch with the same number of steps, each in a separate
process. Token counts exclude padding, and throughput counts predicted tokens. `tools.peers`
compares the losses.

TRL's GKDTrainer computes both models' logits for every position, prompts and padding included, and
takes texts in random order. A second setting has texts of equal length without prompts. TRL's
DistillationTrainer has a chunked loss, but always generates its training text; here it gets the
given texts instead. Ratios are ours over theirs.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from benchmarks.common import (
    MIB,
    JsonOption,
    describe_machine,
    in_fresh_process,
    require,
    rows_table,
    run_command,
    start_benchmark,
    write_json,
)
from benchmarks.shared.distill_contestants import NAMES
from benchmarks.shared.distill_settings import Settings
from train.base.console import Reporter

TRL_REQUIREMENT = "trl>=1.16,<1.17"

Results = dict[str, dict[str, dict[str, Any]]]


def main(
    quick: Annotated[bool, typer.Option("--quick", help="a few minutes on 2 cores")] = False,
    json_file: JsonOption = None,
    precision: Annotated[
        Literal["fp32", "bf16"],
        typer.Option(help="bf16: autocast for the student, a teacher in bfloat16"),
    ] = "fp32",
    repeats: Annotated[int, typer.Option(min=1, help="of every figure; the median counts")] = 1,
) -> None:
    require("trl", TRL_REQUIREMENT, "benchmarks.distill")
    reporter = start_benchmark()
    settings = Settings(precision=precision)
    if quick:
        settings = replace(settings, rows=3, steps=3)
    equal = replace(settings, equal_length=True)
    results = {
        "mixed": _contest(reporter, settings, tuple(NAMES), repeats),
        "equal_length": _contest(reporter, equal, ("ours", "trl"), repeats),
    }
    values = ratios(results)
    for title, contest in results.items():
        reporter.table(_contest_table(f"{title.replace('_', ' ')}, {precision}", contest))
    reporter.table(_ratio_table(values))
    if json_file is not None:
        figures = {
            "benchmark": "distill",
            "quick": quick,
            "settings": asdict(settings),
            "repeats": repeats,
            "process": describe_machine(["trl"]),
            "ratios": values,
            "results": results,
        }
        write_json(json_file, figures)


def ratios(results: Results) -> dict[str, float]:
    """Return ours over theirs for every figure. Good: throughput above 1, memory below 1.

    peak_memory: of the process. training_memory: the memory of training beyond the loaded models.
    """
    values: dict[str, float] = {}
    for setting, contest in results.items():
        ending = "" if setting == "mixed" else f"_{setting}"
        ours = contest["ours"]
        for name, theirs in contest.items():
            if name == "ours":
                continue
            for what, key in (
                ("throughput", "predicted_tokens_per_second"),
                ("peak_memory", "peak_bytes"),
                ("training_memory", "training_bytes"),
            ):
                values[f"{what}_vs_{name}{ending}"] = ours[key] / theirs[key]
    return values


def _contest(
    reporter: Reporter, settings: Settings, names: Sequence[str], repeats: int
) -> dict[str, dict[str, Any]]:
    """Measure every contestant. They take turns, so slow periods of the machine affect them all."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    length = "equal length" if settings.equal_length else "mixed lengths"
    for number in range(repeats):
        for name in names:
            reporter.say(f"{length}, {number + 1} of {repeats}: {NAMES[name]}")
            figures = in_fresh_process(
                "benchmarks.shared.distill_contestants:measure",
                contestant=name,
                settings=asdict(settings),
            )
            runs[name].append(figures)
    return {name: _median(measured) for name, measured in runs.items()}


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the run with the median throughput, and add the throughputs of all runs."""
    speeds = [run["predicted_tokens_per_second"] for run in runs]
    middle = runs[speeds.index(statistics.median_low(speeds))]
    return middle | {"all_predicted_tokens_per_second": speeds}


def _contest_table(title: str, contest: dict[str, dict[str, Any]]) -> Table:
    rows = [
        {
            "contestant": name,
            "tokens/s": f"{figures['predicted_tokens_per_second']:.1f}",
            "CPU s": f"{figures['cpu_seconds']:.1f}",
            "padding": f"{figures['padding_share']:.1%}",
            "peak MiB": f"{figures['peak_bytes'] / MIB:.0f}",
            "MiB above loaded": f"{figures['training_bytes'] / MIB:.0f}",
            "first losses": " ".join(f"{loss:.2f}" for loss in figures["losses"][:3]),
            "mean loss": f"{figures['mean_loss']:.3f}",
        }
        for name, figures in contest.items()
    ]
    return rows_table(title, rows)


def _ratio_table(values: dict[str, float]) -> Table:
    rows = [{"what": name, "ratio": f"{ratio:.2f}"} for name, ratio in values.items()]
    return rows_table("ratios, ours over theirs", rows)


if __name__ == "__main__":
    run_command(main)
