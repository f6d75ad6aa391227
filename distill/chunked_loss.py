"""The loss that students and heads are trained with, chunk by chunk.

It never holds all logits over a large vocabulary in memory. For each chunk it computes the logits
of student and teacher. The gradient overwrites the student's logits. From it follow the gradients
of the student's hidden states and output weights. Then the chunk is freed. So the memory is c·V in
the dtype of the products, for any n. Each logit is computed once: the backward pass needs nothing
of a chunk. Probabilities are float32 (float64 for float64 inputs), for a few rows at a time.

Shapes: n predicted tokens, H hidden size, V vocabulary, c tokens per chunk.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distill.losses import WeightedLoss
from distill.teacher.teacher_signal import Signal, Teacher

# Float32 numbers per block of rows on a CPU. A few such blocks fit into its cache.
CPU_BLOCK = 1 << 18


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher: Teacher | None,
    labels: Tensor,
    weighted_loss: WeightedLoss,
    *,
    chunk: int = 256,
    ranks: Tensor | None = None,
    weights: Tensor | None = None,
    added: tuple[Tensor, Tensor] | None = None,
    values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the terms over n tokens, and each term's sum, float64 [terms].

    The sums of the terms are not differentiable.

    hidden: [n, H], weight: [V, H] and bias: [V], in one dtype: the student's last hidden states and
    output layer. teacher(slice) returns the teacher signal for these tokens; None if no term reads
    it. labels: int64 [n], the actual next tokens. ranks: int64 [n], an output buffer for the number
    of tokens with a higher logit than the label (0: the label is the most likely token; V for a
    label of −100). It needs no extra logits. weights: [n], of the tokens in the loss; None: 1 each.
    The sums of the terms do not use them. added: rows [n, R] and weight [V, R], whose product is
    added to the logits. values: float32 [n, terms], an output buffer for each token's terms.
    """
    rows, columns = added or (None, None)
    loss, totals = _ChunkedLoss.apply(
        hidden,
        weight,
        bias,
        rows,
        columns,
        teacher,
        labels,
        weighted_loss,
        chunk,
        (ranks, values),
        weights,
    )
    return loss, totals


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        added_rows: Tensor | None,
        added_weight: Tensor | None,
        teacher: Teacher | None,
        labels: Tensor,
        weighted_loss: WeightedLoss,
        chunk: int,
        buffers: tuple[Tensor | None, Tensor | None],
        weights: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        inputs = (hidden, weight, bias, added_rows, added_weight)
        ranks, values = buffers
        grads = [
            torch.zeros_like(x, dtype=at_least_float32(x.dtype)) if need and x is not None else None
            for need, x in zip(ctx.needs_input_grad[:5], inputs, strict=True)
        ]
        for_hidden, for_weight, for_bias, for_rows, for_added = grads
        # Cast once, not once per chunk: under autocast each product would cast the whole layer.
        device = hidden.device.type
        h, w, b, a, aw = inputs
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            h, w = h.to(dtype), w.to(dtype)
            b, a, aw = (None if x is None else x.to(dtype) for x in (b, a, aw))
        # Each term's sum, and the weighted sum of all.
        totals = torch.zeros(len(weighted_loss.names), dtype=torch.float64, device=hidden.device)
        total = totals.new_zeros(())
        with torch.autocast(device, enabled=False):
            for begin in range(0, len(hidden), chunk):
                part = slice(begin, begin + chunk)
                logits = F.linear(h[part], w, b)
                if a is not None and aw is not None:
                    logits.addmm_(a[part], aw.t())
                if ranks is not None:
                    ranks[part] = _ranks(logits, labels[part])
                signal = None if teacher is None else teacher(part)
                of_tokens = None if weights is None else weights[part]
                sums, loss = _gradient_in_place(
                    logits,
                    signal,
                    labels[part],
                    weighted_loss,
                    of_tokens,
                    None if values is None else values[part],
                )
                totals += sums
                total += loss
                if for_hidden is not None:
                    for_hidden[part] = logits @ w
                if for_rows is not None and aw is not None:
                    for_rows[part] = logits @ aw
                for for_matrix, x in ((for_weight, h), (for_added, a)):
                    if for_matrix is None or x is None:
                        continue
                    if for_matrix.dtype == logits.dtype:
                        for_matrix.addmm_(logits.t(), x[part])
                    else:
                        for_matrix += logits.t() @ x[part]
                if for_bias is not None:
                    for_bias += logits.sum(0, dtype=for_bias.dtype)
        ctx.grads = grads
        ctx.dtypes = [None if x is None else x.dtype for x in inputs]
        ctx.mark_non_differentiable(totals)
        return total, totals

    @staticmethod
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grads = [
            None if grad is None else grad.mul_(scale.to(grad.dtype)).to(dtype)
            for grad, dtype in zip(ctx.grads, ctx.dtypes, strict=True)
        ]
        return (*grads, *[None] * 6)


def _gradient_in_place(
    logits: Tensor,
    signal: Signal | None,
    labels: Tensor,
    weighted_loss: WeightedLoss,
    weights: Tensor | None,
    term_values: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Overwrite logits [c, V] with their gradient. Return the terms' sums, float64 [terms], and the
    loss, float64. weights: [c], of the tokens in the loss and its gradient; None: 1 each.
    term_values: [c, terms], an output buffer for each token's terms."""
    rows, vocabulary = logits.shape
    block = max(1, CPU_BLOCK // vocabulary) if logits.device.type == "cpu" else rows
    sums = torch.zeros(len(weighted_loss.names), dtype=torch.float64, device=logits.device)
    loss = sums.new_zeros(())
    for begin in range(0, rows, block):
        part = slice(begin, begin + block)
        block_logits = logits[part].to(at_least_float32(logits.dtype))
        values, gradient = weighted_loss.fused(
            block_logits, None if signal is None else signal[part], labels[part]
        )
        if term_values is not None:
            term_values[part] = values.t()
        of_terms = values.sum(-1, dtype=torch.float64)
        sums += of_terms
        if weights is None:
            logits[part] = gradient
            loss += weighted_loss.weigh(of_terms)
        else:
            logits[part] = gradient * weights[part, None]
            loss += (weighted_loss.weigh(values) * weights[part]).sum(dtype=torch.float64)
    return sums, loss


def _ranks(logits: Tensor, labels: Tensor) -> Tensor:
    """int64 [c]: the rank of each label in logits [c, V], as defined in `chunked_loss`."""
    label_logits = logits.gather(1, labels.clamp(min=0)[:, None])
    return torch.where(labels < 0, logits.shape[1], (logits > label_logits).sum(1))


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """float32 for bfloat16 and float16, because a softmax in them is wrong by some percent."""
    return torch.promote_types(dtype, torch.float32)
