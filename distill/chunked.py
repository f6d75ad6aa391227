"""Losses over a large vocabulary without ever holding all the logits.

Shapes: n predicted tokens, H hidden size, V vocabulary, c tokens per chunk.

For each chunk the logits of student and teacher are made, the loss and its gradient with respect
to the student's hidden states and output weights are taken, and the logits are let go. The memory
is c·V, whatever n is. Gradients are computed in the forward pass, as nothing of the chunk is left
in the backward pass; so each chunk's logits are computed once.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distill.losses import Terms

TeacherLogits = Callable[[slice], Tensor]


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher: TeacherLogits | None,
        labels: Tensor,
        terms: Terms,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        wanted = ctx.needs_input_grad[:3]
        inputs: list[Tensor | None] = [hidden, weight, bias]
        grads = [
            torch.zeros_like(x, dtype=_at_least_float32(x.dtype))
            if need and x is not None
            else None
            for need, x in zip(wanted, inputs, strict=True)
        ]
        # Cast once, not once per chunk: under autocast each product would cast the whole layer.
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            inputs = [None if x is None else x.to(dtype) for x in inputs]
        totals = torch.zeros(len(terms.weights), dtype=torch.float64, device=hidden.device)
        with torch.autocast(device, enabled=False):
            for begin in range(0, len(hidden), chunk):
                part = slice(begin, begin + chunk)
                leaves: list[Any] = [
                    None if x is None else x.detach()[part if index == 0 else slice(None)]
                    for index, x in enumerate(inputs)
                ]
                sought = [
                    leaf.requires_grad_() for leaf, need in zip(leaves, wanted, strict=True) if need
                ]
                with torch.enable_grad():
                    logits = F.linear(*leaves)
                    logits = logits.to(_at_least_float32(logits.dtype))
                    against = None
                    if teacher is not None:
                        against = teacher(part)
                        against = against.to(_at_least_float32(against.dtype))
                    losses = terms.per_token(logits, against, labels[part])
                    loss = terms.weigh({name: value.sum() for name, value in losses.items()})
                if sought:
                    found = iter(torch.autograd.grad(loss, sought))
                    for index, grad in enumerate(grads):
                        if grad is not None:
                            (grad[part] if index == 0 else grad).add_(next(found))
                totals += torch.stack([x.detach().sum().double() for x in losses.values()])
        ctx.grads = grads
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        ctx.mark_non_differentiable(totals)
        return terms.weigh(dict(zip(terms.weights, totals, strict=True))), totals

    @staticmethod
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grads = [
            None if grad is None else (grad * scale.to(grad.dtype)).to(dtype)
            for grad, dtype in zip(ctx.grads, ctx.dtypes, strict=True)
        ]
        return (*grads, None, None, None, None)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """float32 for bfloat16 and float16, in which a softmax is off by per cents."""
    return torch.promote_types(dtype, torch.float32)


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher: TeacherLogits | None,
    labels: Tensor,
    terms: Terms,
    *,
    chunk: int = 256,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted sum over n tokens of the terms, and each term's own sum (detached).

    hidden [n, H] and weight [V, H], bias [V] in one dtype: the student's last hidden states and
    output layer. teacher(slice) gives the teacher's logits [c, V] for those tokens; None if no term
    reads it. labels: int64 [n], the tokens that really follow.
    """
    loss, totals = _ChunkedLoss.apply(hidden, weight, bias, teacher, labels, terms, chunk)
    return loss, dict(zip(terms.weights, totals, strict=True))


def eager_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_logits: Tensor | None,
    labels: Tensor,
    terms: Terms,
) -> Tensor:
    """The same weighted sum in one obvious piece, [n, V] at once: the oracle of `chunked_loss`."""
    logits = F.linear(hidden, weight, bias)
    losses = terms.per_token(logits, teacher_logits, labels)
    return terms.weigh({name: value.sum() for name, value in losses.items()})
