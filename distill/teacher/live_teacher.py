"""The target as a teacher: its logits, chunk by chunk, from its hidden states.

Shapes: B rows, T tokens, n predicted tokens, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.model.hidden_states import FINAL
from distill.float32_products import product
from distill.teacher.feature_sources import FeatureSource, LiveFeatures
from distill.teacher.linear_logits import linear_logits
from distill.teacher.teacher_signal import Teacher, TeacherLogits


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
    """Runs the frozen target's output layer on its hidden states, without gradients.

    states: the source of the hidden states, with the layer `FINAL`. None: the target runs over each
    batch, once; one with an encoder needs a source.

    vocabulary: int64 [n], the draft vocabulary. The logits then cover only its tokens, and their
    softmax is the target's distribution p renormalised over it. tokens: used without a vocabulary,
    the number of ids that are tokens. The logits then cover only the first `tokens` rows, without
    the padding.

    timed(): a context in which the output layer runs, and without `states` the target too, so that
    callers can time them. Raises UserError as `linear_logits`.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        states: FeatureSource | None = None,
        *,
        vocabulary: Tensor | None = None,
        tokens: int | None = None,
        timed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        logits = linear_logits(target)
        self._states = states or LiveFeatures(target, [FINAL], timed=timed)
        self._timed = timed
        rows: Tensor | slice | None = vocabulary
        if rows is None and tokens is not None and tokens < len(logits.output.weight):
            rows = slice(tokens)
        self._weight, self._bias = logits.rows(rows)

    @torch.no_grad()
    def signal(
        self, input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor, ids: Sequence[str]
    ) -> Callable[[slice], TeacherLogits]:
        """See `TeacherSource`. The logits of a slice are computed on request."""
        states = self._states.features(input_ids, attention_mask, ids)[FINAL]
        hidden = states[loss_mask[:, 1:].nonzero(as_tuple=True)]

        @torch.no_grad()
        def teacher(part: slice) -> TeacherLogits:
            with self._timed():
                return TeacherLogits(product(hidden[part], self._weight, self._bias))

        return teacher
