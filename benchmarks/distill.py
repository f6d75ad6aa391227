"""Compares distillation with TRL's: throughput and peak memory.

    python -m benchmarks.distill [--quick] [--json FILE] [--precision fp32|bf16]

Runs on the CPU. All contestants train the same student (the first layers of the target with its
full vocabulary) on the same texts for one epoch with the same number of steps, each in a separate
process. Token counts exclude padding, and throughput counts predicted tokens. If the texts are in
the same order, the losses must be the same at every step. The output shows how close they are.

TRL's GKDTrainer computes both models' logits for every position, prompts and padding included, and
takes texts in random order. Two contestants in between show where the difference comes from: ours
with all logits at once, with texts of like length and in random order. A second setting does too:
texts of equal length without prompts. TRL's DistillationTrainer has a chunked loss, but always
generates its training text; here it gets the given texts instead.

With few texts, batches of similar length have more padding than with many.
`padding_share_many_texts` is the share in an epoch of 10,000 texts. Ratios are ours over theirs.
"""

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
    ratio_table,
    require,
    rows_table,
    run_command,
    start_benchmark,
    write_json,
)
from benchmarks.shared.distill_contestants import MANY_TEXTS, NAMES
from benchmarks.shared.distill_settings import Settings
from train.base.console import Reporter

TRL_REQUIREMENT = "trl>=1.16,<1.17"
EQUAL_LENGTH = ("ours", "trl")
# The changes from TRL's trainer to ours, one at a time: (after the change, before it).
LADDER = {
    "predicted_tokens_only": ("ours_eager_random", "trl"),
    "batches_of_like_length": ("ours_eager", "ours_eager_random"),
    "chunked_loss": ("ours", "ours_eager"),
}
# These have the same batches as TRL's trainer, so each step's loss must be the same.
SAME_BATCHES = ("ours_eager_random", "trl_chunked")
Results = dict[str, dict[str, dict[str, Any]]]


def main(
    quick: Annotated[bool, typer.Option("--quick", help="a few minutes on 2 cores")] = False,
    json_file: JsonOption = None,
    precision: Annotated[
        Literal["fp32", "bf16"],
        typer.Option(help="bf16: autocast for the student, a teacher in bfloat16"),
    ] = "fp32",
) -> None:
    require("trl", TRL_REQUIREMENT, "benchmarks.distill")
    reporter = start_benchmark()
    settings = Settings(precision=precision)
    if quick:
        settings = replace(settings, rows=3, steps=3)
    equal = replace(settings, equal_length=True)
    results = {
        "mixed": _contest(reporter, settings, tuple(NAMES)),
        "equal_length": _contest(reporter, equal, EQUAL_LENGTH),
    }
    padding = in_fresh_process(
        "benchmarks.shared.distill_contestants:padding_of_many", settings=asdict(settings)
    )
    values = ratios(results)
    for title, contest in results.items():
        reporter.table(_contest_table(f"{title.replace('_', ' ')}, {precision}", contest))
    reporter.table(ratio_table("ratios, ours over theirs", values))
    shares = ", ".join(f"{name} {share:.1%}" for name, share in padding.items())
    reporter.say(f"padding in an epoch of {MANY_TEXTS:,} texts: {shares}")
    if json_file is not None:
        figures = {
            "benchmark": "distill",
            "quick": quick,
            "settings": asdict(settings),
            "process": describe_machine(["trl"]),
            "ratios": values,
            "padding_share_many_texts": padding,
            "results": results,
        }
        write_json(json_file, figures)


def ratios(results: Results) -> dict[str, float]:
    """Return ours over theirs for every figure. Good: throughput above 1, memory below 1.

    peak_memory: of the process. training_memory: the memory of training beyond the loaded models.
    gain_*: of throughput, for each change from TRL's trainer to ours (mixed lengths).
    loss_difference_*: the largest relative difference of a step's loss on the same batches.
    """
    values: dict[str, float] = {}
    for setting, contest in results.items():
        ending = "" if setting == "mixed" else f"_{setting}"
        ours = contest["ours"]
        for name, theirs in contest.items():
            if name == "ours":
                continue
            rival = name.removeprefix("ours_")
            for what, key in (
                ("throughput", "predicted_tokens_per_second"),
                ("peak_memory", "peak_bytes"),
                ("training_memory", "training_bytes"),
            ):
                values[f"{what}_vs_{rival}{ending}"] = ours[key] / theirs[key]
        if setting == "mixed":
            for change, (after, before) in LADDER.items():
                speed = [contest[n]["predicted_tokens_per_second"] for n in (after, before)]
                values[f"gain_{change}"] = speed[0] / speed[1]
        for name in SAME_BATCHES:
            if name in contest:
                pairs = zip(contest[name]["losses"], contest["trl"]["losses"], strict=True)
                worst = max(abs(ours_ - theirs) / theirs for ours_, theirs in pairs)
                values[f"loss_difference_{name.removeprefix('ours_')}{ending}"] = worst
    return values


def _contest(
    reporter: Reporter, settings: Settings, names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Measure every contestant."""
    figures = {}
    length = "equal length" if settings.equal_length else "mixed lengths"
    for name in names:
        reporter.say(f"{length}: {NAMES[name]}")
        figures[name] = in_fresh_process(
            "benchmarks.shared.distill_contestants:measure",
            contestant=name,
            settings=asdict(settings),
        )
    return figures


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


if __name__ == "__main__":
    run_command(main)
