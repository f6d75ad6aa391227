"""The loss that students and heads are trained with, chunk by chunk.

It never holds all logits over a large vocabulary in memory. For each chunk it computes the logits
of student and teacher. The gradient overwrites the student's logits. From it follow the gradients
of the student's hidden states and output weights. Then the chunk is freed. So the memory is c·V in
the dtype of the products, for any n, and one gradient [V, H] in float32. Each logit is computed
once: the backward pass needs nothing of a chunk. Probabilities are float32 (float64 for float64
inputs), for a few rows at a time.

Shapes: n predicted tokens, H hidden size, V vocabulary, c tokens per chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One loss, and each term's sum: `LossSum.add` to an empty sum."""
    losses = LossSum(weighted_loss, chunk=chunk)
    sums = losses.add(hidden, weight, bias, teacher, labels, weights=weights)
    return losses.total, sums


@dataclass
class _Layer:
    """A weight or bias that losses read.

    parameter: as it was given. values: in the dtype of the products. gradient: over all losses,
    unscaled; None: it gets none.
    """

    parameter: Tensor
    values: Tensor
    gradient: Tensor | None


class LossSum:
    """A sum of losses of one training step, such as those of all depths of a draft.

    The gradient of an output layer is made in the forward pass and stays until the backward pass.
    Losses that read the same layer share one gradient, so it is in memory once.

    chunk: the number of tokens whose logits are in memory at a time.
    """

    def __init__(self, weighted_loss: WeightedLoss, *, chunk: int = 256) -> None:
        self.weighted_loss, self.chunk = weighted_loss, chunk
        self._total: Tensor | None = None
        self._layers: dict[int, _Layer] = {}  # by the parameter's id

    @property
    def total(self) -> Tensor:
        """float64: the sum of the added losses. Run the backward pass of the last total only."""
        assert self._total is not None, "no loss was added yet"
        return self._total

    def add(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher: Teacher | None,
        labels: Tensor,
        *,
        scale: float = 1.0,
        ranks: Tensor | None = None,
        weights: Tensor | None = None,
        added: tuple[Tensor, Tensor] | None = None,
        values: Tensor | None = None,
    ) -> Tensor:
        """Add the weighted sum of the terms over n tokens. Returns each term's sum, float64
        [terms], which is not differentiable.

        hidden: [n, H], weight: [V, H] and bias: [V], in one dtype: the student's last hidden states
        and output layer. teacher(slice) returns the teacher signal for these tokens; None if no
        term reads it. labels: int64 [n], the actual next tokens. scale: the factor of this loss in
        the total. weights: [n], of the tokens in the loss; None: 1 each. The sums of the terms use
        neither of them. ranks: int64 [n], an output buffer for the number of tokens with a higher
        logit than the label (0: the label is the most likely token; V for a label of −100). It
        needs no extra logits. added: rows [n, R] and weight [V, R], whose product is added to the
        logits. values: float32 [n, terms], an output buffer for each token's terms.
        """
        rows, columns = added or (None, None)
        inputs: list[Tensor] = []
        gradients: list[Tensor] = []

        def differentiable(x: Tensor | None) -> Tensor | None:
            """A buffer for the gradient of x, which this loss passes on; None: it needs none."""
            if x is None or not x.requires_grad or not torch.is_grad_enabled():
                return None
            gradient = torch.zeros_like(x, dtype=at_least_float32(x.dtype))
            inputs.append(x)
            gradients.append(gradient)
            return gradient

        def layer(x: Tensor | None) -> _Layer | None:
            if x is None:
                return None
            if id(x) not in self._layers:
                # Cast once: under autocast each product would cast the whole layer.
                self._layers[id(x)] = _Layer(x, _for_products(x), differentiable(x))
            return self._layers[id(x)]

        for_hidden, for_rows = differentiable(hidden), differentiable(rows)
        w, b, c = layer(weight), layer(bias), layer(columns)
        assert w is not None
        h, a = _for_products(hidden), None if rows is None else _for_products(rows)
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            # Each term's sum, and the weighted sum of all.
            sums = torch.zeros(
                len(self.weighted_loss.names), dtype=torch.float64, device=hidden.device
            )
            loss = sums.new_zeros(())
            for begin in range(0, len(hidden), self.chunk):
                part = slice(begin, begin + self.chunk)
                logits = F.linear(h[part], w.values, None if b is None else b.values)
                if a is not None and c is not None:
                    logits.addmm_(a[part], c.values.t())
                if ranks is not None:
                    ranks[part] = _ranks(logits, labels[part])
                part_sums, part_loss = _gradient_in_place(
                    logits,
                    None if teacher is None else teacher(part),
                    labels[part],
                    self.weighted_loss,
                    None if weights is None else weights[part],
                    None if values is None else values[part],
                )
                sums += part_sums
                loss += part_loss
                for buffer, read in ((for_hidden, w), (for_rows, c)):
                    if buffer is not None and read is not None:
                        buffer[part] = logits @ read.values
                for read, x in ((w, h), (c, a)):
                    if read is None or x is None or read.gradient is None:
                        continue
                    if read.gradient.dtype == logits.dtype:
                        read.gradient.addmm_(logits.t(), x[part], alpha=scale)
                    else:
                        read.gradient.add_(logits.t() @ x[part], alpha=scale)
                if b is not None and b.gradient is not None:
                    b.gradient.add_(logits.sum(0, dtype=b.gradient.dtype), alpha=scale)
            if scale != 1:
                loss *= scale
                for buffer in (for_hidden, for_rows):
                    if buffer is not None:
                        buffer *= scale
            before = torch.zeros_like(loss) if self._total is None else self._total
        self._total = _WithGradients.apply(before, loss, gradients, *inputs)
        return sums


class _WithGradients(torch.autograd.Function):
    """before + a loss, whose gradients were computed with it. All losses of a sum thus get the same
    factor in the backward pass, and a gradient that they share is scaled by it once."""

    @staticmethod
    def forward(
        ctx: Any, before: Tensor, loss: Tensor, gradients: Sequence[Tensor], *inputs: Tensor
    ) -> Tensor:
        # Saved tensors are freed in the backward pass, so a parameter can take over its gradient.
        # `.data`: later losses, and the backward pass, change them in place.
        ctx.save_for_backward(*(gradient.data for gradient in gradients))
        ctx.dtypes = [x.dtype for x in inputs]
        return before + loss

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (
            gradient.data.mul_(factor.to(gradient.dtype)).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (factor, None, None, *scaled)


def _for_products(x: Tensor) -> Tensor:
    """x without its graph, in the dtype of the products."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    return x.detach().to(dtype)


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
