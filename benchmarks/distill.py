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

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.common import (
    MIB,
    JsonOption,
    describe_machine,
    in_fresh_process,
    require,
    rows_table,
    run_command,
    save_figure,
    start_benchmark,
    start_process,
    write_json,
)
from benchmarks.shared.distill_contestants import MANY_TEXTS, NAMES, EagerDistillation
from benchmarks.shared.distill_settings import Settings
from benchmarks.shared.process_memory import resident_memory
from distill.distillation_loss import Distillation
from distill.losses import WeightedLoss
from distill.teacher.linear_logits import split_model
from distill.teacher.live_teacher import LiveTeacher
from train.base.console import Reporter
from train.loop.meters.peak_memory import peak_memory, restart_peak
from train.report.plots import LIGHT, SERIES

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

# The models whose cost is measured by text length and vocabulary: random weights, so small that the
# output layer and the loss are most of the work.
KINDS = {"chunked": Distillation, "eager": EagerDistillation}
HIDDEN, LAYERS = 256, 2
WARM_UP_TOKENS = 16

Results = dict[str, dict[str, dict[str, Any]]]


def main(
    quick: Annotated[bool, typer.Option("--quick", help="a few minutes on 2 cores")] = False,
    json_file: JsonOption = None,
    plots: Annotated[Path | None, typer.Option(help="write distill_cost.png here")] = None,
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
    mixed, equal = (QUICK_MIXED, QUICK_EQUAL) if quick else (tuple(NAMES), EQUAL_LENGTH)
    results = {
        "mixed": _contest(reporter, settings, mixed, repeats),
        "equal_length": _contest(reporter, replace(settings, equal_length=True), equal, repeats),
    }
    curves = _curves(reporter, precision, quick)
    padding = in_fresh_process(
        "benchmarks.shared.distill_contestants:padding_of_many", settings=asdict(settings)
    )
    values = ratios(results)
    for title, contest in results.items():
        reporter.table(_contest_table(f"{title.replace('_', ' ')}, {precision}", contest))
    reporter.table(_ratio_table(values))
    shares = ", ".join(f"{name} {share:.1%}" for name, share in padding.items())
    reporter.say(f"padding in an epoch of {MANY_TEXTS:,} texts: {shares}")
    for varied, points in curves.items():
        reporter.table(_curve_table(varied, points))
    if plots is not None:
        plot_curves(curves, plots / "distill_cost.png")
    if json_file is not None:
        figures = {
            "benchmark": "distill",
            "quick": quick,
            "settings": asdict(settings),
            "repeats": repeats,
            "process": describe_machine(["trl"]),
            "ratios": values,
            "padding_share_many_texts": padding,
            "results": results,
            "curves": curves,
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


def _curves(reporter: Reporter, precision: str, quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Measure points with different numbers of tokens, and points with different vocabularies."""
    tokens, vocabularies = (QUICK_TOKENS, QUICK_VOCABULARIES) if quick else (TOKENS, VOCABULARIES)
    sizes = {
        "tokens": [(n, FIXED_VOCABULARY) for n in tokens],
        "vocabulary": [(FIXED_TOKENS, v) for v in vocabularies],
    }
    points: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for n, v in dict.fromkeys(sizes["tokens"] + sizes["vocabulary"]):
        reporter.say(f"cost of {n:,} tokens, vocabulary {v:,}")
        points[n, v] = [
            in_fresh_process(
                "benchmarks.distill:measure_point",
                kind=kind,
                tokens=n,
                vocabulary=v,
                precision=precision,
                repeats=1 if quick else 5,
            )
            for kind in ("chunked", "eager")
        ]
    return {
        varied: [point for pair in pairs for point in points[pair]]
        for varied, pairs in sizes.items()
    }


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
    rows = [
        {"what": name, "ratio": f"{ratio:.1e}" if name.startswith("loss") else f"{ratio:.2f}"}
        for name, ratio in values.items()
    ]
    return rows_table("ratios, ours over theirs", rows)


def _curve_table(varied: str, points: list[dict[str, Any]]) -> Table:
    rows = [
        {
            "loss": point["kind"],
            "tokens": f"{point['tokens']:,}",
            "vocabulary": f"{point['vocabulary']:,}",
            "seconds a step": f"{point['seconds']:.3f}",
            "memory of a step, MiB": f"{point['peak_bytes'] / MIB:.0f}",
        }
        for point in points
    ]
    return rows_table(f"cost against {varied}", rows)


def measure_point(
    kind: str, tokens: int, vocabulary: int, precision: str, repeats: int
) -> dict[str, Any]:
    """Return the seconds and the peak memory of a step on one text of `tokens` predicted tokens.

    A step is the forward of both models, the loss and the backward. seconds: the median of
    `repeats` steps after one uncounted step. peak_bytes: the peak memory of the steps, without the
    models and the student's gradients, which exist before them. kind: one of KINDS. Call it in a
    fresh process.
    """
    start_process()
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    teacher = LiveTeacher(split_model(_tiny(vocabulary, seed=0).to(dtype)))
    module = KINDS[kind](_tiny(vocabulary, seed=1).train(), WeightedLoss({"forward_kl": 1.0}))
    text = torch.randint(0, vocabulary, (1, tokens + 1), generator=torch.Generator().manual_seed(0))

    def step(ids: torch.Tensor) -> float:
        begin = time.perf_counter()
        ones = torch.ones_like(ids)
        signal = teacher.signal(ids, ones, ones.bool(), ids=[])
        # The teacher stays outside: accelerate puts only the trained module under autocast.
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss, _ = module(ids, ones, ones.bool(), teacher=signal)
        loss.backward()
        return time.perf_counter() - begin

    step(text[:, :WARM_UP_TOKENS])
    gc.collect()
    before = resident_memory()
    restart_peak("cpu")
    seconds = [step(text) for _ in range(repeats + 1)][1:]
    return {
        "kind": kind,
        "tokens": tokens,
        "vocabulary": vocabulary,
        "seconds": statistics.median(seconds),
        "peak_bytes": peak_memory("cpu") - before,
    }


def plot_curves(points: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Plot the points as a PNG. points: by "tokens", and by "vocabulary"."""
    figure = Figure(figsize=(8.4, 5.4), layout="constrained")
    grid = figure.subplots(2, 2, sharex="col")
    figures = {"seconds": ("seconds a step", 1), "peak_bytes": ("memory of a step, MiB", MIB)}
    for column, (varied, varied_points) in enumerate(points.items()):
        fixed = {"tokens": "vocabulary", "vocabulary": "tokens"}[varied]
        grid[0][column].set_title(f"{fixed}: {varied_points[0][fixed]:,}", fontsize=10)
        grid[1][column].set_xlabel(varied)
        for axes, (name, (label, unit)) in zip(grid[:, column], figures.items(), strict=True):
            for kind, colour in zip(KINDS, SERIES, strict=False):
                line = sorted(
                    (p[varied], p[name] / unit) for p in varied_points if p["kind"] == kind
                )
                shown = {"eager": "all logits at once"}.get(kind, kind)
                axes.plot(*zip(*line, strict=True), "o-", color=colour, label=shown)
            axes.set_ylim(bottom=0)
            axes.set_xlim(left=0)
            axes.xaxis.set_major_locator(MaxNLocator(5))
            axes.grid(color=LIGHT["grid"])
            axes.spines[["top", "right"]].set_visible(False)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            if column == 0:
                axes.set_ylabel(label)
    grid[0][0].legend(frameon=False)
    save_figure(figure, path)


def _tiny(vocabulary: int, seed: int) -> PreTrainedModel:
    config = AutoConfig.for_model(
        "llama",
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=8192,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


if __name__ == "__main__":
    run_command(main)
