"""The draft length follows the acceptance of earlier drafts."""

import numpy as np

from decode.base.errors import require_fits
from decode.lengths import POLICIES, Policy
from decode.lengths.watcher import require_min_depth
from decode.verification import Verification


@POLICIES.register("heuristic")
class Heuristic(Policy):
    """The length of a row grows by 2 if all its draft tokens were accepted, else it shrinks by 1,
    but stays at least 1. This is the schedule of assisted generation in `transformers`. A row
    without a draft keeps its length.

    first: the initial length for a text. Default: 5, or `max_depth` if that is less.
    """

    _lengths: np.ndarray  # [B]

    def __init__(self, max_depth: int = 8, first: int | None = None) -> None:
        super().__init__(max_depth)
        self.first = min(5, max_depth) if first is None else first
        expected = f"a length from 1 to max_depth, {max_depth}"
        require_fits(lambda x: 1 <= x <= max_depth, expected, first=self.first)
        self.per_row = {"_lengths": self.first}

    def depths(self) -> np.ndarray:
        return self._lengths.copy()

    def observe(self, verification: Verification) -> None:
        all_accepted = verification.accepted >= verification.longest()
        change = np.where(all_accepted, 2, -1)
        lengths = np.clip(self._lengths + change, 1, self.max_depth)
        self._lengths = np.where(verification.drafted > 0, lengths, self._lengths)


@POLICIES.register("feedback")
class Feedback(Policy):
    """γ = min_depth + (max_depth − min_depth)·r, rounded. r is an EMA (exponential moving average)
    of la/k, the accepted tokens / draft tokens of one draft, per row.

    ema: the weight of the past. A text begins with r = `first`. A row without a draft keeps its r.
    """

    _ratio: np.ndarray  # [B]

    def __init__(
        self, max_depth: int = 8, min_depth: int = 1, ema: float = 0.7, first: float = 0.5
    ) -> None:
        super().__init__(max_depth)
        require_min_depth(min_depth, max_depth)
        expected = "a number from 0 to 1 (ema below 1)"
        require_fits(lambda x: 0 <= x < 1, expected, ema=ema)
        require_fits(lambda x: 0 <= x <= 1, expected, first=first)
        self.min_depth, self.ema, self.first = min_depth, ema, first
        self.per_row = {"_ratio": self.first}

    def depths(self) -> np.ndarray:
        lengths = self.min_depth + (self.max_depth - self.min_depth) * self._ratio
        return np.floor(lengths + 0.5).astype(np.int64)

    def observe(self, verification: Verification) -> None:
        ratio = self.ema * self._ratio + (1 - self.ema) * verification.kept_share()
        self._ratio = np.where(verification.drafted > 0, ratio, self._ratio)
