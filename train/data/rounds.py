"""The texts that a drafter is trained on, round after round."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from train.data.chat import Sample

# The trained parameters whose names begin with a prefix, whole, without it; on every rank.
Weights = Callable[[str], dict[str, Tensor]]


class Text(Protocol):
    """Samples by round; a round is the same whenever it is asked for, so that training resumes.

    fixed: every round has the same samples, so that a round is an epoch.
    """

    fixed: bool

    def round(self, number: int, weights: Weights) -> Sequence[Sample]:
        """The samples of round `number`, from 0. weights: what is being trained, as it is
        now; all ranks call `round` together."""
        ...


class FixedText:
    """The same samples in every round."""

    fixed = True

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def round(self, number: int, weights: Weights) -> Sequence[Sample]:
        return self._samples
