"""Float32 products of a training, by the faster of PyTorch's two libraries for them.

PyTorch multiplies float32 by MKL. MKL gives processors of other makers than Intel its kernels for
AVX2, although they have AVX-512. oneDNN, which comes with PyTorch too, uses AVX-512 on all: on a
Zen 5 its products take less than half of the time. Sums have another order, so results differ by
rounding. The rule looks at the processor only, so that a resumed training multiplies as before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from decode.base.processor import cpu_flags
from decode.model.forward.lean_parts import lacking_operators


@cache
def is_faster() -> bool:
    """Whether oneDNN is the faster library here."""
    if not torch.backends.mkldnn.is_available() or "_linear_pointwise" in lacking_operators():
        return False
    try:
        words = cpu_flags()
    except OSError:
        return False
    return "avx512f" in words and "GenuineIntel" not in words


def runs(*tensors: Tensor) -> bool:
    """Whether oneDNN multiplies these tensors."""
    if torch.compiler.is_compiling() or not is_faster() or torch.is_autocast_enabled("cpu"):
        return False
    return all(_fits(x) and x.dim() > 1 and x.numel() for x in tensors)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x·Wᵀ + b, without a gradient: [..., out] for x [..., in], weight [out, in] of any strides and
    bias [out]."""
    if not runs(x, weight):
        return linear(x, weight, bias)
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


@contextmanager
def float32_products(module: nn.Module) -> Iterator[None]:
    """Inside this context the module's linear layers use `product`, forward and backward.

    The layers themselves change, so those that checkpointing runs again do it in the same way.
    """
    layers = [x for x in module.modules() if type(x) is nn.Linear and _fits(x.weight)]
    layers = layers if is_faster() else []
    for layer in layers:
        layer.__class__ = _Linear
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = nn.Linear


def _fits(x: Tensor) -> bool:
    plain = type(x) in (Tensor, nn.Parameter)
    return plain and x.dtype == torch.float32 and x.device.type == "cpu"


class _Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if not runs(x, self.weight):
            return super().forward(x)
        outputs: Tensor = _LinearFunction.apply(x, self.weight, self.bias)
        return outputs


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return product(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        return (
            product(gradient, weight.t()) if of_x else None,
            product(rows.t(), x.flatten(0, -2).t()) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )
