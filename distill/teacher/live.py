"""Computes the teacher signal for a text by running the target."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from distill.teacher.output_layer import SplitModel
from distill.teacher.signal import Teacher, TeacherLogits


class TeacherSource(Protocol):
    """A source of the teacher signal for a batch."""

    def signal(
        self, input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor, ids: Sequence[str]
    ) -> Teacher:
        """Return the teacher for a batch [B, T] of samples `ids`.

        The teacher returns the signal for a slice of the n predicted tokens.
        """
        ...


class LiveTeacher:
    """Runs the frozen target over each batch, once and without gradients.

    With `remember`, the last hidden states of every predicted token are kept on the CPU after
    their first use (H numbers per token in the target's dtype, not V). Later epochs over the same
    samples then need no forward and still see the target's full distribution.

    vocabulary: int64 [n], the draft vocabulary. The logits then cover only its tokens, and their
    softmax is the target's distribution p renormalised over it. tokens: used without a vocabulary,
    the number of ids that are tokens. The logits then cover only the first `tokens` rows, without
    the padding.

    timed(): a context in which the teacher does its work, so that callers can time it.
    """

    def __init__(
        self,
        target: SplitModel,
        *,
        remember: bool = False,
        vocabulary: Tensor | None = None,
        tokens: int | None = None,
        timed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.target = target
        self._timed = timed
        output = target.output
        self._weight: Tensor = output.weight
        self._bias: Tensor | None = output.bias
        rows: Tensor | slice | None = vocabulary
        if rows is None and tokens is not None and tokens < len(self._weight):
            rows = slice(tokens)
        if rows is not None:
            self._weight = self._weight[rows]
            self._bias = None if self._bias is None else self._bias[rows]
        self._kept: dict[str, Tensor] | None = {} if remember else None

    @torch.no_grad()
    def signal(
        self, input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor, ids: Sequence[str]
    ) -> Callable[[slice], TeacherLogits]:
        """See `TeacherSource`. The logits of a slice are computed on request."""
        with self._timed():
            hidden = self.hidden(input_ids, attention_mask, loss_mask, ids)

        @torch.no_grad()
        def teacher(part: slice) -> TeacherLogits:
            with self._timed():
                return TeacherLogits(F.linear(hidden[part], self._weight, self._bias))

        return teacher

    def hidden(
        self, input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor, ids: Sequence[str]
    ) -> Tensor:
        """[n, H]: the hidden states for the predicted tokens, from memory or from a forward."""
        hidden = self._recall(ids, input_ids.device)
        if hidden is None:
            predicted = loss_mask[:, 1:]
            hidden = self.target.hidden(input_ids, attention_mask)[:, :-1][predicted]
            if self._kept is not None:
                counts = predicted.sum(1).tolist()
                self._kept.update(zip(ids, hidden.cpu().split(counts), strict=False))
        return hidden

    def _recall(self, ids: Sequence[str], device: torch.device) -> Tensor | None:
        if not self._kept or not ids or any(sample not in self._kept for sample in ids):
            return None
        return torch.cat([self._kept[sample] for sample in ids]).to(device)
