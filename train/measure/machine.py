"""What the machine can do: its GPUs, its dtypes, its speed, and the kernels that a model gets."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel

from decode.model.cache.cached_model import CachedLM
from decode.model.forward import few_rows, few_rows_layers, lean_forward, lean_layer, lean_parts
from decode.model.forward.huge_pages import has_huge_pages, in_huge_pages
from decode.model.forward.prepare_model import (
    has_products,
    reason_against_lean,
    reason_against_packing,
)
from decode.model.forward.quantised_rows import NAMES
from decode.model.loading import DTYPES
from distill.float32_products import product
from train.measure.time_passes import pass_seconds, seconds_by_turns, weight_bytes, weight_count

GIB = 2**30
# Bytes that are read to measure the memory: far more than caches hold.
READ = GIB
MULTIPLIED = 2_000_000  # turns of products in registers: some milliseconds
# A matrix product this long is not dominated by its start.
LONG_PRODUCT = 0.02
SMALLEST, LARGEST = 256, 8192  # rows of the square matrices
TURNS, BUDGET = 5, 2.0


def describe_gpus() -> list[dict[str, Any]]:
    """Name, memory in GiB (all, free) and compute capability of each GPU that PyTorch sees."""
    gpus = []
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        major, minor = torch.cuda.get_device_capability(number)
        gpus.append(
            {
                "name": torch.cuda.get_device_name(number),
                "memory_gib": total / GIB,
                "free_gib": free / GIB,
                "capability": f"{major}.{minor}",
            }
        )
    return gpus


def has_fast_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device multiplies matrices in a dtype. Otherwise it converts them, which is
    slow."""
    if device.type == "cpu":
        return has_products(dtype)
    if dtype == torch.bfloat16:
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return True


def read_speed(device: torch.device) -> float:
    """Bytes per second that are read from memory at most: past the caches, or where our products do
    not run, by a sum over a large tensor."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = psutil.virtual_memory().available
    x = torch.ones(min(READ, free // 8) // 4, device=device)
    found = few_rows.library(torch.float32) if device.type == "cpu" else None
    read = x.sum
    if found is not None:
        x = in_huge_pages(x)
        read = partial(found.read_once, x.data_ptr(), x.nbytes)
    (seconds,) = seconds_by_turns([read], turns=TURNS, budget=BUDGET, device=device)
    return x.nbytes / seconds


def register_speed(device: torch.device, dtype: torch.dtype) -> float | None:
    """Floating-point operations per second of products whose numbers stay in registers: what the
    processor can do at most. None where ours do not run."""
    found = few_rows.library(dtype) if device.type == "cpu" else None
    if found is None:
        return None
    total = torch.zeros(1)
    multiply = partial(found.multiply_only, MULTIPLIED, total.data_ptr())
    (seconds,) = seconds_by_turns([multiply], turns=TURNS, budget=BUDGET)
    return float(multiply() / seconds)


def product_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a product of two square matrices, as trainings
    multiply. Their size grows until a product is long enough."""

    def seconds_at(size: int, turns: int) -> float:
        x = torch.ones(size, size, device=device, dtype=dtype)
        multiply = partial(product, x, x)
        return seconds_by_turns([multiply], turns=turns, budget=BUDGET, device=device)[0]

    size = SMALLEST
    while size < LARGEST and seconds_at(size, 1) < LONG_PRODUCT:
        size *= 2
    return float(2 * size**3 / seconds_at(size, TURNS))


@dataclass(frozen=True)
class MachineLimit:
    """What a pass takes at least on this machine: it reads all weights once, and multiplies each
    token with them. A machine can do both at once. Attention is not counted.

    nbytes: of the weights. weights: their number. read_speed: bytes per second. multiply_speed:
    floating-point operations per second.
    """

    nbytes: int
    weights: int
    read_speed: float
    multiply_speed: float

    @classmethod
    def of(cls, model: PreTrainedModel, read_speed: float, multiply_speed: float) -> "MachineLimit":
        """The limit of a model in its dtype, as it is packed here."""
        return cls(weight_bytes(model), weight_count(model), read_speed, multiply_speed)

    def seconds(self, tokens: int) -> float:
        """Of a pass over so many tokens, of all rows together."""
        reading = self.nbytes / self.read_speed
        return max(reading, 2 * self.weights * tokens / self.multiply_speed)


def passes_beside(
    limit: MachineLimit | None,
    lm: CachedLM,
    context: int,
    widths: Sequence[int],
    *,
    turns: int,
    budget: float = math.inf,
) -> list[dict[str, Any]]:
    """A row for each number of tokens fed after a text of `context` tokens, of those that the
    model's context has room for. limit: None if it could not be measured. turns, budget: as for
    `pass_seconds`. widths: with a 1, first.

    of_limit: the least time that the machine allows, as a share of the pass's. cost: in passes over
    one token. highest_speedup: if all draft tokens are accepted and drafting is free.
    """
    widths = [width for width in widths if context + width <= lm.max_positions]
    if not widths:
        return []
    seconds = pass_seconds(lm, context, widths, turns=turns, budget=budget)
    return [
        {
            "context": context,
            "fed": width,
            "ms": 1e3 * seconds[width],
            "of_limit": limit.seconds(width) / seconds[width] if limit else None,
            "cost": seconds[width] / seconds[1],
            "highest_speedup": width * seconds[1] / seconds[width],
        }
        for width in widths
    ]


def dtype_speeds(device: torch.device) -> dict[str, dict[str, Any]]:
    """By dtype: whether the device has matrix products in it, and the speed of PyTorch's and of
    products in registers in FLOP/s (None: not known)."""
    return {
        name: {
            "fast": has_fast_products(device, dtype),
            "flops_per_second": product_speed(device, dtype),
            "register_flops_per_second": register_speed(device, dtype),
        }
        for name, dtype in DTYPES.items()
    }


def describe_kernels(lm: CachedLM) -> dict[str, Any]:
    """What the loop replaces in a model, found in its prepared form.

    forward: lean, or transformers'. packed: the number of packed matrix products. layers: the
    number of layers. weights: the megabytes of packed weights in each form. huge_pages: whether
    they lie in pages of 2 MB. attention: whether ours is used. exact_bits: whether chains have the
    bits of plain decoding (`CachedLM.keeps_bits`). parts: the number of modules of each class of
    ours.
    not_packed_because, not_lean_because, not_compiled_because (the layers in C++): the reason, or
    None. not_compiled_because is None on a GPU too.
    """
    model, prepared = lm.model, lm.forward_pass
    modules = lean_forward, lean_layer, lean_parts, few_rows_layers
    files = {module.__name__ for module in modules}
    ours = Counter(
        type(module).__name__ for module in prepared.modules() if type(module).__module__ in files
    )
    packed = ours[lean_parts.PackedLinear.__name__]
    not_compiled = None
    if lm.device.type == "cpu" and few_rows.library(model.dtype) is None:
        not_compiled = few_rows.reason_against(model.dtype)
    weights: Counter[str] = Counter()
    for part in prepared.modules():
        if isinstance(part, lean_parts.PackedLinear) and part.has_blocks:
            blocks = part.blocks[0]
            weights[NAMES[blocks.form]] += blocks.data.nbytes
    return {
        "packed": packed,
        "forward": "lean" if isinstance(prepared, lean_forward.LeanForward) else "transformers",
        "layers": model.config.get_text_config().num_hidden_layers,
        "weights": {name: size / 1e6 for name, size in weights.items()},
        "huge_pages": bool(weights) and has_huge_pages(),
        "attention": prepared.has_our_attention,
        "exact_bits": lm.keeps_bits,
        "parts": dict(ours),
        "not_compiled_because": not_compiled,
        "not_packed_because": None if packed else reason_against_packing(model),
        "not_lean_because": reason_against_lean(model),
    }
