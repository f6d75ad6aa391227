"""The live target as a teacher: its hidden states, and its logits chunk by chunk.

Shapes: B rows, T tokens, n predicted tokens, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.model.hidden_states import FINAL
from distill.float32_products import float32_products, product
from distill.teacher.feature_sources import FeatureSource
from distill.teacher.teacher_signal import Teacher, TeacherLogits


@dataclass
class SplitModel:
    """A model in two parts.

    `stack` maps token ids to hidden states after the final norm. `output` maps these to logits, and
    `added`, [V], is added to them. A model with an encoder has no `stack`; `decoder_states` gives
    its hidden states.
    """

    stack: nn.Module | None
    output: nn.Linear
    added: Tensor | None = None

    def rows(self, rows: Tensor | slice | None) -> tuple[Tensor, Tensor | None]:
        """The weight [d, H] and the bias [d] of some rows of the output; None means all."""
        weight, bias = output_rows(self.output, rows)
        if self.added is None:
            return weight, bias
        added = (self.added if rows is None else self.added[rows]).to(weight.dtype)
        return weight, added if bias is None else bias + added

    def hidden(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return [B, T, H] for int64 ids and mask [B, T]."""
        assert self.stack is not None, "a model with an encoder reads sources too"
        with float32_products(self.stack):
            return self.stack(
                input_ids=input_ids, attention_mask=attention_mask, use_cache=False
            ).last_hidden_state


def added_bias(model: PreTrainedModel) -> Tensor | None:
    """[V]: what BART and Marian add to the logits of the output layer."""
    bias = getattr(model, "final_logits_bias", None)
    return bias[0] if isinstance(bias, Tensor) else None


def output_rows(layer: nn.Linear, rows: Tensor | slice | None) -> tuple[Tensor, Tensor | None]:
    """Return the weight [d, H] and the bias [d] of some rows of an output layer; None means all."""
    if rows is None:
        return layer.weight, layer.bias
    return layer.weight[rows], None if layer.bias is None else layer.bias[rows]


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
        vocabulary: Tensor | None = None,
        tokens: int | None = None,
        timed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.target = target
        self._timed = timed
        rows: Tensor | slice | None = vocabulary
        if rows is None and tokens is not None and tokens < len(target.output.weight):
            rows = slice(tokens)
        self._weight, self._bias = target.rows(rows)

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
                return TeacherLogits(product(hidden[part], self._weight, self._bias))

        return teacher

    def hidden(
        self, input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor, ids: Sequence[str]
    ) -> Tensor:
        """[n, H]: the hidden states for the predicted tokens."""
        states = self.target.hidden(input_ids, attention_mask)
        return states[loss_mask[:, 1:].nonzero(as_tuple=True)]


class StatesTeacher(LiveTeacher):
    """A `LiveTeacher` that runs only the target's output layer, on the hidden states of a source.

    states: must contain the layer `FINAL`. vocabulary, tokens, timed: as for `LiveTeacher`.
    """

    def __init__(
        self,
        target: SplitModel,
        states: FeatureSource,
        *,
        vocabulary: Tensor | None = None,
        tokens: int | None = None,
        timed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__(target, vocabulary=vocabulary, tokens=tokens, timed=timed)
        self._states = states

    def hidden(
        self, input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor, ids: Sequence[str]
    ) -> Tensor:
        states = self._states.features(input_ids, attention_mask, ids)[FINAL]
        return states[loss_mask[:, 1:].nonzero(as_tuple=True)]
