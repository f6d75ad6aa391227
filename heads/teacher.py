"""The whole distribution of the target from its cached hidden states, to distil a drafter on."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from decode.features import FINAL
from distill.output import SplitModel
from distill.teacher import LiveTeacher
from heads.cache import CachedFeatures


class CachedStatesTeacher(LiveTeacher):
    """A `LiveTeacher` whose target is run no further than its output layer.

    states: holds the tap `FINAL`. vocabulary, tokens, timed: as of `LiveTeacher`.
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
