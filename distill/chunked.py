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
        inputs = (hidden, weight, bias)
        wanted = ctx.needs_input_grad[:3]
        grads = [
            torch.zeros_like(x, dtype=at_least_float32(x.new_empty(0)).dtype) if need else None
            for need, x in zip(wanted, inputs, strict=True)
        ]
        # Cast once, not once per chunk: under autocast each product would cast the whole layer.
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            inputs = tuple(None if x is None else x.to(dtype) for x in inputs)
        totals = torch.zeros(len(terms.weights), dtype=torch.float64, device=hidden.device)
        with torch.autocast(device, enabled=False):
            for begin in range(0, len(hidden), chunk):
                part = slice(begin, begin + chunk)
                leaves = [
                    None if x is None else x.detach().requires_grad_(need)
                    for need, x in zip(
                        wanted, (inputs[0][part], inputs[1], inputs[2]), strict=True
                    )
                ]
                with torch.enable_grad():
                    logits = at_least_float32(F.linear(*leaves))
                    against = at_least_float32(teacher(part)) if teacher else None
                    losses = terms.per_token(logits, against, labels[part])
                    loss = terms.weigh({name: value.sum() for name, value in losses.items()})
                if any(wanted):
                    sought = [leaf for need, leaf in zip(wanted, leaves, strict=True) if need]
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


def at_least_float32(logits: Tensor) -> Tensor:
    """bfloat16 and float16 go to float32, since a softmax in them is off by per cents."""
    return logits if logits.dtype == torch.float64 else logits.float()


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
