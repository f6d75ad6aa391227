"""The student and its loss as one module, and the chunked loss that it and heads are trained with.

`Distillation` is a module, so any engine can wrap the whole computation. `chunked_loss` never holds
all logits over a large vocabulary in memory. For each chunk it computes the logits of student and
teacher. The gradient overwrites the student's logits. From it follow the gradients of the student's
hidden states and output weights. Then the chunk is freed. So the memory is c·V in the dtype of the
products, for any n. Each logit is computed once: the backward pass needs nothing of a chunk.
Probabilities are float32 (float64 for float64 inputs), for a few rows at a time.

Shapes: B rows, T tokens, n predicted tokens, H hidden size, V vocabulary, c tokens per chunk.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.agreement import Agreement, agreement_sums
from distill.choose_vocabulary import rows_of_tokens
from distill.losses import WeightedLoss
from distill.teacher.teacher_signal import (
    Signal,
    SplitModel,
    Teacher,
    TeacherLogits,
    added_bias,
    split_model,
)

# Float32 numbers per block of rows on a CPU. A few such blocks fit into its cache.
CPU_BLOCK = 1 << 18


class Distillation(nn.Module):
    """Computes the distillation loss of `student` on a batch.

    The output layer is used only inside `forward`, because engines that shard weights (FSDP, ZeRO)
    gather them only there.

    vocabulary: int64 [n], the token ids of a reduced output layer (`distill.choose_vocabulary`).
    tokens: the number of ids that are tokens. The student's output rows after them are padding.
    Padding rows get no gradient, and the student's probabilities are renormalised over the other
    rows. The teacher's must be renormalised in the same way. text_ids: the number of ids that a
    text can have, if the text is not in the student's tokens.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        weighted_loss: WeightedLoss,
        *,
        chunk: int = 256,
        vocabulary: Tensor | None = None,
        tokens: int | None = None,
        text_ids: int | None = None,
    ) -> None:
        super().__init__()
        split_model(student)  # raises if logits need more than a linear layer
        self.student = student
        self.vocab_size: int = student.config.get_text_config().vocab_size
        ids = text_ids or self.vocab_size
        self.tokens = min(ids, tokens or ids)
        rows = None if vocabulary is None else rows_of_tokens(vocabulary, ids)
        self.register_buffer("label_rows", rows, persistent=False)
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        self.weighted_loss = weighted_loss
        self.chunk = chunk

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        teacher: Teacher | None = None,
        agreement_with: Callable[[slice], TeacherLogits] | None = None,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The weighted loss summed over the predicted tokens, and each term's sum, float64 [terms].

        input_ids, attention_mask: int64 [B, T]. loss_mask: bool [B, T], True where the token is
        predicted, from the hidden state before it.

        agreement_with: returns the target's logits over its full vocabulary. If given, the loss is
        0 and the second value is `agreement_sums`.

        weights: float32 [n], of the predicted tokens in the loss; None: 1 each. The terms' sums do
        not use them.
        """
        states = self.hidden_states(input_ids, attention_mask)
        return self.of_states(states, input_ids, loss_mask, teacher, agreement_with, weights)

    def of_states(
        self,
        states: Tensor,
        input_ids: Tensor,
        loss_mask: Tensor,
        teacher: Teacher | None,
        agreement_with: Callable[[slice], TeacherLogits] | None,
        weights: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """`forward` of the student's hidden states after each token, [B, T, H]."""
        predicted = loss_mask[:, 1:]
        hidden = states[:, :-1][predicted]
        if agreement_with is not None:
            return hidden.new_zeros(()), self.agreement(hidden, agreement_with)
        return self.loss(hidden, input_ids[:, 1:][predicted], teacher, weights)

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[B, T, H]: the student's hidden state after each token. int64 [B, T] each."""
        hidden: Tensor = self.student.base_model(
            input_ids=self.known(input_ids), attention_mask=attention_mask, use_cache=False
        ).last_hidden_state
        return hidden

    def known(self, input_ids: Tensor) -> Tensor:
        """The same ids. A target with more rows may emit ids for which the student has no
        embedding; these become its last one."""
        return input_ids.clamp(max=self.vocab_size - 1)

    def loss(
        self,
        hidden: Tensor,
        labels: Tensor,
        teacher: Teacher | None,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`chunked_loss` of hidden states [n, H] that predict the tokens `labels`, int64 [n]."""
        weight, bias, _ = self._output()
        return chunked_loss(
            hidden,
            weight,
            bias,
            teacher,
            self.output_rows(labels),
            self.weighted_loss,
            chunk=self.chunk,
            weights=weights,
        )

    def output_rows(self, labels: Tensor) -> Tensor:
        """int64 [n]: the rows of the output layer for tokens, int64 [n]; −100 for a token without
        a row."""
        labels = torch.where(labels < self.tokens, labels, -100)
        rows = self.label_rows
        if isinstance(rows, Tensor):
            labels = torch.where(labels < 0, labels, rows[labels.clamp(min=0)])
        return labels

    def agreement(self, hidden: Tensor, target: Callable[[slice], TeacherLogits]) -> Tensor:
        """`agreement_sums` of hidden states [n, H]."""
        weight, bias, ids = self._output()
        return agreement_sums(hidden, weight, bias, target, ids, chunk=self.chunk)

    def figures(self, sums: Tensor) -> dict[str, float]:
        """The figures of `Agreement` from the sums that `forward` returns with `agreement_with`,
        added up over batches."""
        return asdict(Agreement.from_sums(sums))

    def _output(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The rows of the output layer that are tokens, weight and bias, and their ids if it is
        reduced."""
        ids = self.vocabulary if isinstance(self.vocabulary, Tensor) else None
        # A reduced layer has no padding.
        padded = ids is None and self.tokens < self.vocab_size
        rows = slice(self.tokens) if padded else None
        layer, added = self.student.get_output_embeddings(), added_bias(self.student)
        return *SplitModel(None, layer, added).rows(rows), ids


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


def eager_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    signal: Signal | None,
    labels: Tensor,
    weighted_loss: WeightedLoss,
) -> Tensor:
    """The same weighted sum, from all logits [n, V] at once: the oracle of `chunked_loss`."""
    logits = F.linear(hidden, weight, bias)
    return weighted_loss.weigh(weighted_loss.values(logits, signal, labels).sum(-1))


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
            torch.zeros_like(x, dtype=_at_least_float32(x.dtype))
            if need and x is not None
            else None
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
        block_logits = logits[part].to(_at_least_float32(logits.dtype))
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


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """float32 for bfloat16 and float16, because a softmax in them is wrong by some percent."""
    return torch.promote_types(dtype, torch.float32)
