"""The cost of the distillation loss by text length and vocabulary; part of `benchmarks.distill`.

A teacher and a student with random weights and two layers of size 256. They are so small that the
output layer and the loss are most of the work.
"""

import gc
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.common import MIB, forget_peak, peak_resident_memory, resident_memory, save_figure
from benchmarks.distill_contestants import EagerDistillation
from distill.losses import WeightedLoss
from distill.module import Distillation
from distill.teacher.live import LiveTeacher
from distill.teacher.output_layer import split_model
from train.cli.command import cores, quieten
from train.plots import LIGHT, SERIES

KINDS = {"chunked": Distillation, "eager": EagerDistillation}
HIDDEN, LAYERS = 256, 2
_FEW = 16  # tokens of the warm-up step


def measure_point(
    kind: str, tokens: int, vocabulary: int, precision: str, repeats: int
) -> dict[str, Any]:
    """Return the seconds and the peak memory of a step on one text of `tokens` predicted tokens.

    A step is the forward of both models, the loss and the backward. seconds: the median of
    `repeats` steps after one uncounted step. peak_bytes: the peak memory of the steps, without the
    models and the student's gradients, which exist before them. kind: one of KINDS. Call it in a
    fresh process.
    """
    quieten()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores())
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

    step(text[:, :_FEW])
    gc.collect()
    before = resident_memory()
    forget_peak()
    seconds = [step(text) for _ in range(repeats + 1)][1:]
    return {
        "kind": kind,
        "tokens": tokens,
        "vocabulary": vocabulary,
        "seconds": statistics.median(seconds),
        "peak_bytes": peak_resident_memory() - before,
    }


def draw(points: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Plot the points as a PNG. points: by "tokens", and by "vocabulary"."""
    figure = Figure(figsize=(8.4, 5.4), layout="constrained")
    grid = figure.subplots(2, 2, sharex="col")
    figures = {"seconds": ("seconds a step", 1), "peak_bytes": ("memory of a step, MiB", MIB)}
    for column, (varied, of_it) in enumerate(points.items()):
        fixed = {"tokens": "vocabulary", "vocabulary": "tokens"}[varied]
        grid[0][column].set_title(f"{fixed}: {of_it[0][fixed]:,}", fontsize=10)
        grid[1][column].set_xlabel(varied)
        for axes, (name, (label, unit)) in zip(grid[:, column], figures.items(), strict=True):
            for kind, colour in zip(KINDS, SERIES, strict=False):
                line = sorted((p[varied], p[name] / unit) for p in of_it if p["kind"] == kind)
                axes.plot(*zip(*line, strict=True), "o-", color=colour, label=kind)
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
