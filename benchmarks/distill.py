"""Compares distillation with TRL's: throughput, peak memory, and the cost of vocabulary and length.

    python -m benchmarks.distill [--quick] [--json FILE] [--plots DIR] [--precision fp32|bf16]

Runs on the CPU. All contestants train the same student (the first layers of the target with its
full vocabulary) on the same texts for one epoch with the same number of steps, each in a separate
process. Token counts exclude padding, and throughput counts predicted tokens. If the texts are in
the same order, the losses must be the same at every step. The output shows how close they are.

TRL's GKDTrainer computes both models' logits for every position, prompts and padding included, and
takes texts in random order. Three contestants in between show where the difference comes from: TRL
with texts grouped by length, ours in random order, and ours with all logits at once. A second
setting does too: texts of equal length without prompts. TRL's DistillationTrainer has a chunked
loss, but always generates its training text; here it gets the given texts instead.

With few texts, batches of similar length have more padding than with many.
`padding_share_many_texts` is the share in an epoch of 10,000 texts. Ratios are ours over theirs.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from benchmarks.common import MIB, describe_machine, in_fresh_process, require, write_json
from benchmarks.distill_contestants import MANY_TEXTS, NAMES, Settings
from train.cli.command import quieten, shows_errors
from train.console import Reporter

TRL_REQUIREMENT = "trl>=1.16,<1.17"
EQUAL_LENGTH = ("ours", "ours_eager", "trl", "trl_chunked")
QUICK_MIXED = ("ours", "ours_eager", "ours_eager_random", "trl", "trl_chunked")
QUICK_EQUAL = ("ours", "trl")
# The changes from TRL's trainer to ours, one at a time: (after the change, before it).
LADDER = {
    "predicted_tokens_only": ("ours_eager_random", "trl"),
    "batches_of_like_length": ("ours_eager", "ours_eager_random"),
    "chunked_loss": ("ours", "ours_eager"),
}
# These have the same batches as TRL's trainer, so each step's loss must be the same.
SAME_BATCHES = ("ours_random", "ours_eager_random", "trl_chunked")
VOCABULARIES, TOKENS = (8192, 32768, 65536, 131072), (256, 512, 1024, 2048, 4096)
QUICK_VOCABULARIES, QUICK_TOKENS = (8192, 32768), (256, 1024)
FIXED_TOKENS, FIXED_VOCABULARY = 1024, 32768

Results = dict[str, dict[str, dict[str, Any]]]


def main(
    quick: Annotated[bool, typer.Option("--quick", help="a few minutes on 2 cores")] = False,
    json: Annotated[Path | None, typer.Option(help="write all figures here")] = None,
    plots: Annotated[Path | None, typer.Option(help="write distill_cost.png here")] = None,
    precision: Annotated[
        Literal["fp32", "bf16"],
        typer.Option(help="bf16: autocast for the student, a teacher in bfloat16"),
    ] = "fp32",
    repeats: Annotated[int, typer.Option(min=1, help="of every figure; medians are kept")] = 1,
) -> None:
    require("trl", TRL_REQUIREMENT, "benchmarks.distill")
    quieten()
    reporter = Reporter()
    settings = Settings(precision=precision)
    if quick:
        settings = replace(settings, rows=3, steps=3)
    mixed, equal = (QUICK_MIXED, QUICK_EQUAL) if quick else (tuple(NAMES), EQUAL_LENGTH)
    results = {
        "mixed": _contest(reporter, settings, mixed, repeats),
        "equal_length": _contest(reporter, replace(settings, equal_length=True), equal, repeats),
    }
    curves = _curves(reporter, precision, quick)
    padding = in_fresh_process(
        "benchmarks.distill_contestants:padding_of_many", settings=asdict(settings)
    )
    summary = ratios(results)
    for title, contest in results.items():
        reporter.table(_table(f"{title.replace('_', ' ')}, {precision}", contest))
    reporter.table(_ratio_table(summary))
    shares = ", ".join(f"{name} {share:.1%}" for name, share in padding.items())
    reporter.say(f"padding in an epoch of {MANY_TEXTS:,} texts: {shares}")
    for varied, points in curves.items():
        reporter.table(_curve_table(varied, points))
    if plots is not None:
        from benchmarks.distill_curves import draw

        draw(curves, plots / "distill_cost.png")
    if json is not None:
        figures = {
            "benchmark": "distill",
            "quick": quick,
            "settings": asdict(settings),
            "repeats": repeats,
            "process": describe_machine(["trl"]),
            "ratios": summary,
            "padding_share_many_texts": padding,
            "results": results,
            "curves": curves,
        }
        write_json(json, figures)


def ratios(results: Results) -> dict[str, float]:
    """Return ours over theirs for every figure. Good: throughput above 1, memory below 1.

    peak_memory: of the process. training_memory: the memory of training beyond the loaded models.
    gain_*: of throughput, for each change from TRL's trainer to ours (mixed lengths).
    loss_difference_*: the largest relative difference of a step's loss on the same batches.
    """
    found: dict[str, float] = {}
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
                found[f"{what}_vs_{rival}{ending}"] = ours[key] / theirs[key]
        if setting == "mixed":
            for change, (after, before) in LADDER.items():
                speed = [contest[n]["predicted_tokens_per_second"] for n in (after, before)]
                found[f"gain_{change}"] = speed[0] / speed[1]
        for name in SAME_BATCHES:
            if name in contest:
                pairs = zip(contest[name]["losses"], contest["trl"]["losses"], strict=True)
                worst = max(abs(ours_ - theirs) / theirs for ours_, theirs in pairs)
                found[f"loss_difference_{name.removeprefix('ours_')}{ending}"] = worst
    return found


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
                "benchmarks.distill_contestants:measure",
                contestant=name,
                settings=asdict(settings),
            )
            runs[name].append(figures)
    return {name: _median(found) for name, found in runs.items()}


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the run with the median throughput, and add the throughputs of all runs."""
    speeds = [run["predicted_tokens_per_second"] for run in runs]
    middle = runs[speeds.index(statistics.median_low(speeds))]
    return middle | {"all_predicted_tokens_per_second": speeds}


def _curves(reporter: Reporter, precision: str, quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Measure points with different numbers of tokens, and points with different vocabularies."""
    tokens, vocabularies = (QUICK_TOKENS, QUICK_VOCABULARIES) if quick else (TOKENS, VOCABULARIES)
    wanted = {
        "tokens": [(n, FIXED_VOCABULARY) for n in tokens],
        "vocabulary": [(FIXED_TOKENS, v) for v in vocabularies],
    }
    points: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for n, v in dict.fromkeys(wanted["tokens"] + wanted["vocabulary"]):
        reporter.say(f"cost of {n:,} tokens, vocabulary {v:,}")
        points[n, v] = [
            in_fresh_process(
                "benchmarks.distill_curves:measure_point",
                kind=kind,
                tokens=n,
                vocabulary=v,
                precision=precision,
                repeats=1 if quick else 5,
            )
            for kind in ("chunked", "eager")
        ]
    return {
        varied: [point for place in places for point in points[place]]
        for varied, places in wanted.items()
    }


def _table(title: str, contest: dict[str, dict[str, Any]]) -> Table:
    columns = (
        "contestant",
        "tokens/s",
        "CPU s",
        "padding",
        "peak MiB",
        "MiB above loaded",
        "first losses",
        "mean loss",
    )
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column == "contestant" else "right")
    for name, found in contest.items():
        table.add_row(
            name,
            f"{found['predicted_tokens_per_second']:.1f}",
            f"{found['cpu_seconds']:.1f}",
            f"{found['padding_share']:.1%}",
            f"{found['peak_bytes'] / MIB:.0f}",
            f"{found['training_bytes'] / MIB:.0f}",
            " ".join(f"{loss:.2f}" for loss in found["losses"][:3]),
            f"{found['mean_loss']:.3f}",
        )
    return table


def _ratio_table(summary: dict[str, float]) -> Table:
    table = Table(title="ratios, ours over theirs")
    table.add_column("what")
    table.add_column("ratio", justify="right")
    for name, ratio in summary.items():
        table.add_row(name, f"{ratio:.1e}" if name.startswith("loss") else f"{ratio:.2f}")
    return table


def _curve_table(varied: str, points: list[dict[str, Any]]) -> Table:
    table = Table(title=f"cost against {varied}")
    for column in ("loss", "tokens", "vocabulary", "seconds a step", "memory of a step, MiB"):
        table.add_column(column, justify="left" if column == "loss" else "right")
    for point in points:
        table.add_row(
            point["kind"],
            f"{point['tokens']:,}",
            f"{point['vocabulary']:,}",
            f"{point['seconds']:.3f}",
            f"{point['peak_bytes'] / MIB:.0f}",
        )
    return table


if __name__ == "__main__":
    typer.run(shows_errors(main))
