"""Computes the target's full distribution from cached hidden states, for distillation."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from decode.target.hidden_states import FINAL
from distill.teacher.hidden_state_cache import CachedFeatures
from distill.teacher.live import LiveTeacher
from distill.teacher.output_layer import SplitModel


class CachedStatesTeacher(LiveTeacher):
    """A `LiveTeacher` that runs only the target's output layer, on cached hidden states.

    states: must contain the layer `FINAL`. vocabulary, tokens, timed: as for `LiveTeacher`.
    """

    def __init__(
        self,
        target: SplitModel,
        states: CachedFeatures,
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
        return states[:, :-1][loss_mask[:, 1:]]
