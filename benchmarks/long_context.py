"""Measures EAGLE-3's training on long texts: seconds and peak memory against the text's length.

    python -m benchmarks.long_context [--quick] [--json FILE] [--device auto|cpu|cuda]
                                      [--length N …] [--steps N] [--compiled]

Two parts, each with a row for every length, forward and backward, one text at a time:

- the attention of all steps: from all scores, T × T for each head and step, and merged
  (`heads.layers.unrolled_attention`);
- a whole training step of the heads, without the target's pass: with all activations kept, with
  gradient checkpointing, and with --compiled also through `torch.compile` of the decoder layer.

Everything is random: only shapes matter. Float32 on a CPU, bfloat16 on CUDA. Each row runs in a
process of its own. Memory is the peak above what was there before: of the process, on CUDA of
tensors. Seconds are the median of three. Before that, the largest difference of both forms of
attention from float64 is printed, over outputs and gradients. It shows that this device computes
the same. A row that fails (out of memory) is reported in one line.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import (
    MIB,
    DeviceOption,
    JsonOption,
    describe_machine,
    in_fresh_process,
    rows_table,
    run_command,
    start_benchmark,
    start_process,
    write_json,
)
from benchmarks.shared.dense_attention import dense_attention
from benchmarks.shared.process_memory import forget_peak, peak_resident_memory, resident_memory
from decode.model.hidden_states import FINAL
from decode.model.loading import resolve_device
from distill.losses import WeightedLoss
from heads.eagle3_heads import Eagle3Heads, Eagle3Options
from heads.head_training import HeadTraining
from heads.layers.llama_layer import DraftLayer
from heads.layers.unrolled_attention import causal_attention, merged_attention

TURNS = 3
WARM_UP = 64  # tokens
ATTENTIONS = {"all scores": dense_attention, "merged": merged_attention}
# By part: the two rows that are compared.
PARTS = {"attention": tuple(ATTENTIONS), "step": ("kept", "checkpointed")}
COMPILED = "compiled"
# By ratio: a compiled step is compared with a kept one.
COMPARED = PARTS | {COMPILED: (PARTS["step"][0], COMPILED)}
Figures = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """heads, key_heads, size: of the drafter's attention. inner: the width of its feed-forward
    network. vocabulary: the rows of its output layer. Its hidden size is heads · size."""

    heads: int
    key_heads: int
    size: int
    inner: int
    vocabulary: int
    steps: int = 7


# On CUDA the sizes of Llama-3.2-1B.
CUDA, CPU = Shape(32, 8, 64, 8192, 32000), Shape(8, 4, 64, 1536, 4096)
LENGTHS = {"cuda": (2048, 4096, 8192, 16384), "cpu": (512, 1024, 2048)}


def main(
    quick: Annotated[bool, typer.Option("--quick", help="two lengths")] = False,
    json_file: JsonOption = None,
    device: DeviceOption = "auto",
    length: Annotated[list[int] | None, typer.Option(min=2, help="tokens of a text")] = None,
    steps: Annotated[int, typer.Option(min=2, help="of the training-time test")] = 7,
    compiled: Annotated[bool, typer.Option("--compiled", help="also with torch.compile")] = False,
) -> None:
    """Run both parts and print their tables."""
    reporter = start_benchmark()
    kind = resolve_device(device).type
    shape = replace(CUDA if kind == "cuda" else CPU, steps=steps)
    lengths = length or LENGTHS[kind][: 2 if quick else None]
    reporter.say(f"device: {kind}, {torch.get_num_threads()} threads; {shape}")
    differences = measure_differences(shape, min(lengths), kind)
    for name, difference in differences.items():
        reporter.say(f"attention, {name}: differs from float64 by {difference:.1e} at most")
    results: dict[str, dict[int, Figures]] = {}
    errors: dict[str, str] = {}
    for part, pair in PARTS.items():
        names = (*pair, COMPILED) if compiled and part == "step" else pair
        for name in names:
            for tokens in lengths:
                try:
                    results.setdefault(name, {})[tokens] = in_fresh_process(
                        f"benchmarks.long_context:measure_{part}",
                        name=name,
                        shape=asdict(shape),
                        length=tokens,
                        device=kind,
                    )
                except RuntimeError as error:
                    errors[f"{name}_{tokens}"] = str(error).splitlines()[-1]
        rows = [
            {"tokens": f"{tokens:,}"} | {name: _cell(results, name, tokens) for name in names}
            for tokens in lengths
        ]
        reporter.table(rows_table(f"{part}: seconds, peak memory", rows))
    for row, reason in errors.items():
        reporter.say(f"{row} failed: {reason}")
    if json_file is not None:
        figures = {
            "benchmark": "long_context",
            "quick": quick,
            "device": kind,
            "process": describe_machine(),
            "shape": asdict(shape),
            "ratios": ratios(results),
            "differences": differences,
            "results": results,
            "errors": errors,
        }
        write_json(json_file, figures)


def ratios(results: Mapping[str, Mapping[int, Figures]]) -> dict[str, float]:
    """Return, flat by name, seconds and peak memory of the second row of each part over those of
    the first, for each length that has both; and the seconds of a compiled step over a kept one's.
    """
    values: dict[str, float] = {}
    for part, (first, second) in COMPARED.items():
        for tokens, ours in results.get(second, {}).items():
            theirs = results.get(first, {}).get(tokens)
            if theirs is not None:
                # A compiled step begins with the memory of its first turn.
                for key in ("seconds",) if part == COMPILED else ("seconds", "peak_bytes"):
                    values[f"{part}_{key}_{tokens}"] = ours[key] / theirs[key]
    return values


def measure_attention(name: str, shape: dict[str, Any], length: int, device: str) -> Figures:
    """Return the seconds and the peak memory of the attention of all steps, in bytes."""
    start_process()
    sizes = Shape(**shape)

    def turn(tokens: int) -> Callable[[], Any]:
        tensors = _tensors(sizes, tokens, device, _dtype(device))
        return lambda: _run_attention(name, *tensors)

    return _measured(turn, length, device)


def measure_step(name: str, shape: dict[str, Any], length: int, device: str) -> Figures:
    """Return the seconds and the peak memory of a training step, in bytes, without its weights,
    their gradients and the target's states."""
    start_process()
    sizes = Shape(**shape)
    training = _training(sizes, device)
    training.heads.gradient_checkpointing = name == "checkpointed"
    if name == COMPILED:
        for module in training.heads.modules():
            if isinstance(module, DraftLayer):
                module.compile()
    half = _dtype(device) != torch.float32
    hidden = training.heads.hidden_size

    def turn(tokens: int) -> Callable[[], None]:
        ids = torch.randint(sizes.vocabulary, (1, tokens), device=device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        layers = (*training.captured_layers, FINAL)
        features = {
            x: torch.randn(1, tokens, hidden, device=device, dtype=_dtype(device)) for x in layers
        }
        weights = training.heads.loss_weights(0.0)

        def run() -> None:
            with torch.autocast(device, torch.bfloat16) if half else nullcontext():
                loss, _ = training(ids, mask, features, weights)
            loss.backward()

        return run

    # A graph may be made for each length, so the first turn of this one does not count.
    return _measured(turn, length, device, WARM_UP if name != COMPILED else length)


def measure_differences(shape: Shape, length: int, device: str) -> dict[str, float]:
    """Return, for each form of attention, the largest difference of an output or a gradient from
    that in float64, as a share of the largest number of that tensor."""
    tensors = _tensors(shape, length, device, _dtype(device))
    exact = _run_attention("all scores", *([x.double() for x in group] for group in tensors))
    differences = {}
    for name in ATTENTIONS:
        pairs = zip(_run_attention(name, *tensors), exact, strict=True)
        differences[name] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return differences


def _measured(
    turn: Callable[[int], Callable[[], Any]], length: int, device: str, warm_up: int = WARM_UP
) -> Figures:
    turn(warm_up)()
    run = turn(length)
    seconds = []
    forget_peak(device)
    before = resident_memory(device)
    for _ in range(TURNS):
        start = perf_counter()
        run()
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(perf_counter() - start)
    peak = peak_resident_memory(device) - before
    return {"seconds": median(seconds), "peak_bytes": max(peak, 1)}


def _dtype(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


def _tensors(
    shape: Shape, length: int, device: str, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Queries, keys and values of all steps, [1, heads, length, size] each."""
    torch.manual_seed(0)

    def drawn(heads: int) -> list[Tensor]:
        size = 1, length, heads, shape.size
        tensors = (torch.randn(size, device=device) for _ in range(shape.steps))
        return [x.to(dtype).transpose(1, 2) for x in tensors]

    return drawn(shape.heads), drawn(shape.key_heads), drawn(shape.key_heads)


def _run_attention(
    name: str, queries: list[Tensor], keys: list[Tensor], values: list[Tensor]
) -> list[Tensor]:
    """All steps' outputs, and the gradients of all inputs."""
    queries, keys, values = (
        [x.detach().requires_grad_() for x in group] for group in (queries, keys, values)
    )
    attend = ATTENTIONS[name]
    later = range(1, len(queries))
    outputs = [
        causal_attention(queries[0], keys[0], values[0]),
        *(attend(queries[i], keys[: i + 1], values[: i + 1]) for i in later),
    ]
    # Gradients as different as the outputs.
    gradients = [x.detach() for x in outputs]
    return [*gradients, *torch.autograd.grad(outputs, [*queries, *keys, *values], gradients)]


def _training(shape: Shape, device: str) -> HeadTraining:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.heads * shape.size,
        intermediate_size=shape.inner,
        num_hidden_layers=7,  # the fewest that EAGLE-3 reads; they are never run
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).to(device, _dtype(device))
    heads = Eagle3Heads(Eagle3Options(steps=shape.steps, output="target"), model)
    heads.init_weights(model)
    heads.to(device).borrow(model)
    return HeadTraining(heads, WeightedLoss({"forward_kl": 1.0}), model).train()


def _cell(results: Mapping[str, Mapping[int, Figures]], name: str, tokens: int) -> str:
    figures = results.get(name, {}).get(tokens)
    if figures is None:
        return "failed"
    return f"{figures['seconds']:.2f} s, {figures['peak_bytes'] / MIB:,.0f} MiB"


if __name__ == "__main__":
    run_command(main)
