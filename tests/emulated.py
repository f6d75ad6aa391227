"""A plugin for pytest, `-p tests.emulated`: layers and products in bfloat16 are compiled for any
processor with AVX2, with instructions that it lacks in plain C++. They are slow, and their sums are
those of a processor that has them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from decode.base import processor
from decode.model.forward import few_rows, lean_parts, prepare_model

HEADER = Path(__file__).with_name("emulated_avx512.h")
_OURS = few_rows.NUMBERS[torch.bfloat16]
_flags, _pack = processor.cpu_flags, lean_parts._packed_by_torch

# The tests are small: better code would save less time than the compiler takes to make it.
few_rows.FLAGS.append("-O1")
few_rows.NUMBERS[torch.bfloat16] = replace(_OURS, flags=("-include", str(HEADER)), uses=())
few_rows.cpu_flags = processor.cpu_flags = lambda: _flags() | _OURS.needs
prepare_model.has_products = lambda dtype: dtype in (torch.float32, torch.bfloat16)


# Products of other shapes are PyTorch's, whose packed form needs the instructions too.
def _packed(weights: Sequence[Tensor]) -> Tensor:
    joined = lean_parts.joined(weights)
    return joined if joined.dtype == torch.bfloat16 else _pack(weights)


def _is_plain(layer: lean_parts.PackedLinear) -> bool:
    return not layer.has_blocks and layer._packed.dtype == torch.bfloat16


def _forward(
    self: lean_parts.PackedLinear, x: Tensor, activation: str = "none", algorithm: str = ""
) -> Tensor:
    if not _is_plain(self):
        return _own(self, x, activation, algorithm)
    found = linear(x, self._packed, self._packed_bias)
    return found if activation == "none" else lean_parts.ACTIVATIONS[activation, algorithm](found)


def _combined(self: lean_parts.PackedLinear, x: Tensor, other: Tensor, operation: str) -> Tensor:
    if not _is_plain(self):
        return _own_combined(self, x, other, operation)
    found = linear(x, self._packed, self._packed_bias)
    return found + other if operation == "add" else found * other


lean_parts._packed_by_torch = _packed
_own, lean_parts.PackedLinear.forward = lean_parts.PackedLinear.forward, _forward  # type: ignore[method-assign]
_own_combined = lean_parts.PackedLinear.combined
lean_parts.PackedLinear.combined = _combined  # type: ignore[method-assign]
