"""The loss that students and heads are trained with, chunk by chunk.

It never holds all logits over a large vocabulary in memory. For each chunk it computes the logits
of student and teacher. The gradient overwrites the student's logits. From it follow the gradients
of the student's hidden states and output weights. Then the chunk is freed. So the memory is c·V in
the dtype of the products, for any n, and one gradient [V, H] in float32. Each logit is computed
once: the backward pass needs nothing of a chunk. Probabilities are float32 (float64 for float64
inputs), for a few rows at a time.

Shapes: n predicted tokens, H hidden size, V vocabulary, c tokens per chunk.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill.float32_products import product as multiplied
from distill.float32_products import runs
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
    (sums,) = losses.add(teacher, TokenLoss(hidden, weight, bias, labels, weights=weights))
    return losses.total, sums


@dataclass
class TokenLoss:
    """What a loss over n tokens reads, and what it writes.

    hidden: [n, H], weight: [V, H] and bias: [V], in one dtype: the student's last hidden states and
    output layer. labels: int64 [n], the actual next tokens. scale: the factor of this loss in the
    total. weights: [n], of the tokens in the loss; None: 1 each. The sums of the terms use neither
    of them. added: rows [n, R] and weight [V, R], whose product is added to the logits. places:
    int64 [n], ascending, the teacher's place for each token; None: place i for token i. Of the
    places from 0 to the last one, each is that of a token of some loss.

    ranks: int64 [n], an output buffer for the number of tokens with a higher logit than the label
    (0: the label is the most likely token; V for a label of −100). It needs no extra logits.
    values: float32 [n, terms], an output buffer for each token's terms.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    scale: float = 1.0
    weights: Tensor | None = None
    added: tuple[Tensor, Tensor] | None = None
    places: Tensor | None = None
    ranks: Tensor | None = None
    values: Tensor | None = None


@dataclass
class _Parameter:
    """A weight or bias that losses read.

    parameter: as it was given. values: in the dtype of the products. gradient: over all losses,
    unscaled; None: it gets none.
    """

    parameter: Tensor
    values: Tensor
    gradient: Tensor | None


@dataclass
class _LogitProduct:
    """A product that is a part of logits. inputs: [n, R], in the dtype of the products. gradient:
    theirs, [n, R]; None: they get none."""

    inputs: Tensor
    layer: _Parameter
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
        self._layers: dict[int, _Parameter] = {}  # by the parameter's id
        self._memory: Tensor | None = None  # for logits: a system clears new memory first

    @property
    def total(self) -> Tensor:
        """float64: the sum of the added losses. Run the backward pass of the last total only."""
        assert self._total is not None, "no loss was added yet"
        return self._total

    def add(self, teacher: Teacher | None, *losses: TokenLoss) -> Tensor:
        """Add the weighted sum of the terms over the tokens of each loss. Returns each term's sum,
        float64 [losses, terms], which is not differentiable.

        teacher(slice) returns the teacher signal of these places; None if no term reads it. It is
        asked once for each chunk of places, whatever number of losses reads them.
        """
        inputs: list[Tensor] = []
        gradients: list[Tensor] = []

        def differentiable(x: Tensor) -> Tensor | None:
            """A buffer for the gradient of x, which this loss passes on; None: it needs none."""
            if not x.requires_grad or not torch.is_grad_enabled():
                return None
            gradient = torch.zeros_like(x, dtype=at_least_float32(x.dtype))
            inputs.append(x)
            gradients.append(gradient)
            return gradient

        def layer(x: Tensor) -> _Parameter:
            if id(x) not in self._layers:
                # Cast once: under autocast each product would cast the whole layer.
                self._layers[id(x)] = _Parameter(x, _for_products(x), differentiable(x))
            return self._layers[id(x)]

        # Those of the output layer, and of what is added to its logits; and its bias.
        products: list[list[_LogitProduct]] = []
        biases: list[_Parameter | None] = []
        for loss in losses:
            pairs = [(loss.hidden, loss.weight), *([loss.added] if loss.added else [])]
            products.append(
                [_LogitProduct(_for_products(x), layer(y), differentiable(x)) for x, y in pairs]
            )
            biases.append(None if loss.bias is None else layer(loss.bias))
        device = losses[0].hidden.device
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            # Each term's sum, and the weighted sum of all.
            sums = torch.zeros(
                len(losses), len(self.weighted_loss.names), dtype=torch.float64, device=device
            )
            value = sums.new_zeros(())
            for places, tokens in _chunks(losses, self.chunk):
                signal = None if teacher is None else teacher(places)
                for number, part in tokens:
                    loss = losses[number]
                    rows = loss.places
                    if rows is not None:
                        whole = part.stop - part.start == places.stop - places.start
                        rows = None if whole else rows[part] - places.start
                    part_sums, part_value = self._add_chunk(
                        loss, products[number], biases[number], part, signal, rows
                    )
                    sums[number] += part_sums
                    value += part_value * loss.scale
                signal = None  # before there is the next one
            for loss, of_loss in zip(losses, products, strict=True):
                for product in of_loss:
                    if loss.scale != 1 and product.gradient is not None:
                        product.gradient *= loss.scale
            before = torch.zeros_like(value) if self._total is None else self._total
        self._total = _WithGradients.apply(before, value, gradients, *inputs)
        return sums

    def _add_chunk(
        self,
        loss: TokenLoss,
        products: Sequence[_LogitProduct],
        bias: _Parameter | None,
        part: slice,
        signal: Signal | None,
        signal_rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """`_gradient_in_place` of a part of a loss, and the gradients that follow from it."""
        logits = self._chunk_logits(products, bias, part)
        labels = loss.labels[part]
        if loss.ranks is not None:
            loss.ranks[part] = _ranks(logits, labels)
        result = _gradient_in_place(
            logits,
            signal,
            signal_rows,
            labels,
            self.weighted_loss,
            None if loss.weights is None else loss.weights[part],
            None if loss.values is None else loss.values[part],
        )
        for product in products:
            if product.gradient is not None:
                product.gradient[part] = multiplied(logits, product.layer.values.t())
            gradient = product.layer.gradient
            if gradient is None:
                continue
            if gradient.dtype == logits.dtype and not runs(logits):
                gradient.addmm_(logits.t(), product.inputs[part], alpha=loss.scale)
                continue
            # On a CPU some rows at a time: in its cache they become float32 at no cost.
            on_cpu, count = gradient.device.type == "cpu", len(gradient)
            step = max(1, CPU_BLOCK // gradient.shape[1]) if on_cpu else count
            for begin in range(0, count, step):
                rows = slice(begin, begin + step)
                # A copy, because in `logits` the numbers of a column are far apart.
                block = logits[:, rows].contiguous()
                added = multiplied(block.t(), product.inputs[part].t())
                gradient[rows].add_(added, alpha=loss.scale)
        if bias is not None and bias.gradient is not None:
            of_bias = logits.sum(0, dtype=bias.gradient.dtype)
            bias.gradient.add_(of_bias, alpha=loss.scale)
        return result

    def _chunk_logits(
        self, products: Sequence[_LogitProduct], bias: _Parameter | None, part: slice
    ) -> Tensor:
        """Logits. The next ones overwrite them, unless oneDNN makes them."""
        first, *others = products
        inputs, weight = first.inputs[part], first.layer.values
        if runs(inputs, weight):
            logits = multiplied(inputs, weight, None if bias is None else bias.values)
            for added in others:
                logits.add_(multiplied(added.inputs[part], added.layer.values))
            return logits
        size = len(inputs) * len(weight)
        if self._memory is None or len(self._memory) < size or self._memory.dtype != weight.dtype:
            self._memory = None  # before there is the next one
            self._memory = weight.new_empty(size)
        logits = self._memory[:size].view(len(inputs), len(weight))
        if bias is None:
            torch.mm(inputs, weight.t(), out=logits)
        else:
            torch.addmm(bias.values, inputs, weight.t(), out=logits)
        for added in others:
            logits.addmm_(added.inputs[part], added.layer.values.t())
        return logits


def _chunks(
    losses: Sequence[TokenLoss], chunk: int
) -> Iterator[tuple[slice, list[tuple[int, slice]]]]:
    """The chunks of the teacher's places, and for each the number of every loss with tokens there
    and which these are. If a loss has `places`, the host waits for the device, once for all."""
    tokens = sum(len(loss.labels) for loss in losses)
    if not tokens:
        return
    device = next((x.places.device for x in losses if x.places is not None), torch.device("cpu"))
    places = [
        torch.arange(len(x.labels), device=device) if x.places is None else x.places for x in losses
    ]
    edges = torch.arange(0, tokens + chunk, chunk, device=device)
    begins = [torch.searchsorted(x, edges) for x in places]
    last = torch.cat(places).amax()
    *bounds, (largest, *_) = torch.stack([*begins, last.expand_as(edges)]).tolist()
    for number, begin in enumerate(range(0, largest + 1, chunk)):
        parts = [(i, slice(x[number], x[number + 1])) for i, x in enumerate(bounds)]
        end = min(begin + chunk, largest + 1)
        yield slice(begin, end), [(i, part) for i, part in parts if part.start < part.stop]


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
    rows: Tensor | None,
    labels: Tensor,
    weighted_loss: WeightedLoss,
    weights: Tensor | None,
    term_values: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Overwrite logits [c, V] with their gradient. Return the terms' sums, float64 [terms], and the
    loss, float64. rows: int64 [c], those of the signal for these tokens; None: row i for token i.
    weights: [c], of the tokens in the loss and its gradient; None: 1 each. term_values: [c, terms],
    an output buffer for each token's terms."""
    count, vocabulary = logits.shape
    block = max(1, CPU_BLOCK // vocabulary) if logits.device.type == "cpu" else count
    sums = torch.zeros(len(weighted_loss.names), dtype=torch.float64, device=logits.device)
    loss = sums.new_zeros(())
    for begin in range(0, count, block):
        part = slice(begin, begin + block)
        block_logits = logits[part].to(at_least_float32(logits.dtype))
        block_signal = None if signal is None else signal[part if rows is None else rows[part]]
        values, gradient = weighted_loss.fused(block_logits, block_signal, labels[part])
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
    """int64 [c]: the rank of each label in logits [c, V], as `TokenLoss` defines it."""
    higher = logits > logits.gather(1, labels.clamp(min=0)[:, None])
    if higher.device.type == "cpu":
        # A hundred times as fast as `sum`, which first makes an int64 of each of them.
        counts = torch.tensor([np.count_nonzero(row) for row in higher.numpy()], dtype=torch.int64)
    else:
        counts = higher.sum(1)
    return torch.where(labels < 0, logits.shape[1], counts)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """float32 for bfloat16 and float16, because a softmax in them is wrong by some percent."""
    return torch.promote_types(dtype, torch.float32)
