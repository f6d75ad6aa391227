"""The texts that a drafter is trained on, in rounds."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from train.data.chat import Sample

# Returns the complete trained parameters whose names begin with a prefix, on every rank. The prefix
# is removed from the names.
Weights = Callable[[str], dict[str, Tensor]]


class Text(Protocol):
    """Samples in rounds. A round is the same at every call, so training can resume.

    fixed: every round has the same samples, so a round is an epoch.
    """

    fixed: bool

    def round(self, number: int, weights: Weights) -> Sequence[Sample]:
        """The samples of round `number`, from 0. weights: returns the current weights of the
        training. All ranks must call `round` together."""
        ...


class FixedText:
    """The same samples in every round."""

    fixed = True

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def round(self, number: int, weights: Weights) -> Sequence[Sample]:
        return self._samples
