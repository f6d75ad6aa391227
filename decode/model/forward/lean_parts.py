"""The products and norms of the lean forward, in their fastest form on a CPU.

Weights are packed: kept in the layout of our kernels for few rows (`few_rows`), or of PyTorch's.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from decode.model.forward import few_rows
from decode.model.forward.few_rows import Blocks
from decode.model.forward.quantised_rows import own_blocks

ACTIVATIONS: dict[tuple[str, str], Callable[[Tensor], Tensor]] = {
    ("swish", ""): nn.functional.silu,
    ("gelu", "tanh"): functools.partial(nn.functional.gelu, approximate="tanh"),
    ("gelu", "none"): nn.functional.gelu,
}

# What follows a product before it is rounded, by its number in few_rows.cpp.
MODES = {"none": 0, "add": 1, "mul": 2, "swish": 3}

# Operators of PyTorch's oneDNN that have no public name, so a release may rename them.
OPERATORS = ("_linear_pointwise", "_reorder_linear_weight")


def lacking_operators() -> list[str]:
    """Those of `OPERATORS` that this PyTorch has not."""
    return [name for name in OPERATORS if not hasattr(torch.ops.mkldnn, name)]


class PackedLayer(nn.Module, ABC):
    """Has a second form of its weights."""

    @abstractmethod
    def refresh(self) -> None:
        """Make that form again if a weight was changed in place."""


class Product(nn.Module, ABC):
    """x ↦ x·Wᵀ + b, a replacement for a linear layer, or for several with the same input: their
    outputs follow each other. It shares the parameters of those layers."""

    @abstractmethod
    def forward(self, x: Tensor, activation: str = "none", algorithm: str = "") -> Tensor:
        """activation: none, swish (SiLU), or gelu with an algorithm (none, tanh)."""

    @abstractmethod
    def combined(self, x: Tensor, other: Tensor, operation: str) -> Tensor:
        """The product, added to `other` (add) or multiplied with it (mul)."""


def packed(weights: Sequence[Tensor]) -> Blocks:
    """Weights [out, in] each, one after the other, as the functions for few rows read them."""
    return own_blocks(weights) or few_rows.packed_blocks(joined(weights))


def joined(weights: Sequence[Tensor]) -> Tensor:
    """Weights [out, in] each, one after the other."""
    first, *others = (x.detach() for x in weights)
    return torch.cat([first, *others]) if others else first.contiguous()


class PackedLinear(Product, PackedLayer):
    """A product with packed weights, of one or several layers at once. The activation, the sum and
    the second product are computed before the result is rounded."""

    weight: Tensor
    bias: Tensor | None
    pack: Callable[[Sequence[Tensor]], Blocks] = staticmethod(packed)
    is_only_copy = False  # see `packed_alone`

    def __init__(self, *layers: nn.Linear | Conv1D) -> None:
        super().__init__()
        self.layers = layers
        if len(layers) == 1:
            self.weight, self.bias = layers[0].weight, layers[0].bias
        self._packed_state: list[tuple[int, int]] = []
        self.refresh()

    @property
    def inputs(self) -> tuple[int, torch.dtype]:
        """How many numbers a product adds up, and their dtype."""
        weight = self.layers[0].weight
        return weight.shape[0 if isinstance(self.layers[0], Conv1D) else 1], weight.dtype

    def refresh(self) -> None:
        if self.is_only_copy:
            return
        state = [
            version(x) for layer in self.layers for x in (layer.weight, layer.bias) if x is not None
        ]
        if state == self._packed_state:
            return
        weights = [
            layer.weight.t() if isinstance(layer, Conv1D) else layer.weight for layer in self.layers
        ]
        self.has_blocks = few_rows.fits(weights)
        self._packed: Any = (self.pack if self.has_blocks else _packed_by_torch)(weights)
        biases = [layer.bias.detach() for layer in self.layers if layer.bias is not None]
        self._packed_bias = torch.cat(biases) if biases else None
        self._packed_state = state

    @property
    def blocks(self) -> tuple[Blocks, Tensor | None]:
        """The weights as `pack` makes them, and the bias."""
        assert self.has_blocks
        return self._packed, self._packed_bias

    def forward(self, x: Tensor, activation: str = "none", algorithm: str = "") -> Tensor:
        if self.has_blocks:
            known = activation in MODES
            mode = activation if known else "none"
            found = multiply(x, self._packed, self._packed_bias, None, mode)
            return found if known else ACTIVATIONS[activation, algorithm](found)
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._packed_bias, activation, [], algorithm
        )
        return result

    def combined(self, x: Tensor, other: Tensor, operation: str) -> Tensor:
        if self.has_blocks:
            return multiply(x, self._packed, self._packed_bias, other, operation)
        result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, other, self._packed, self._packed_bias, operation
        )
        return result


def multiply(
    x: Tensor, packed: Blocks, bias: Tensor | None, other: Tensor | None, mode: str
) -> Tensor:
    """x · Wᵀ + b in C++, [..., out], in the dtype of x. mode: what follows before the result is
    rounded: `add` or `mul` with `other`, `swish`, or `none`."""
    found = few_rows.library(x.dtype)
    assert found is not None
    x = x.contiguous()
    out, size = packed.count * few_rows.NUMBERS[x.dtype].outputs, x.shape[-1]
    result = x.new_empty(*x.shape[:-1], out)
    if other is not None:
        other = other.expand_as(result).contiguous()
    found.product(
        x.data_ptr(),
        packed.address,
        None if bias is None else bias.data_ptr(),
        None if other is None else other.data_ptr(),
        result.data_ptr(),
        x.numel() // size,
        size,
        out,
        MODES[mode],
        packed.form,
    )
    return result


def _packed_by_torch(weights: Sequence[Tensor]) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(joined(weights), None)
    return packed


def version(x: Tensor) -> tuple[int, int]:
    """Changes when a tensor is replaced or changed in place."""
    # Tensors created in inference mode have no version counter. They are not trained either.
    return x.data_ptr(), 0 if x.is_inference() else x._version


class LeanNorm(PackedLayer):
    """RMS norm (1910.07467) times `weight` + `offset`.

    Without C++ it is the layer norm of [x, −x], which has mean 0: PyTorch has one operation for
    layer norm on a CPU, and about ten small ones for RMS norm. in_cpp: the dtype of states that C++
    norms.
    """

    def __init__(self, weight: Tensor, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = weight, eps, offset
        self._state: tuple[int, int] | None = None
        self.refresh()

    def refresh(self) -> None:
        state = version(self.weight)
        if state == self._state:
            return
        # A drafter may also run outside of inference mode.
        with torch.inference_mode(False):
            weight = self.weight.detach()
            gain = weight.float() + self.offset if self.offset else weight
            self._gain = torch.cat([gain, gain])
        self.in_cpp = weight.dtype if few_rows.runs(weight) else None
        self._state = state

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        if x.dtype == self.in_cpp:
            found = few_rows.library(x.dtype)
            assert found is not None
            x = x.contiguous()
            result, rows, weight = torch.empty_like(x), x.numel() // size, self.weight.data_ptr()
            found.norm(x.data_ptr(), weight, self.offset, self.eps, result.data_ptr(), rows, size)
            return result
        # Without the function of `torch.nn`, whose checks take as long as the sums of a token.
        normed = torch.layer_norm(torch.cat([x, -x], -1), (2 * size,), self._gain, None, self.eps)
        return normed[..., :size]
