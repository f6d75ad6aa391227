"""The draft length follows the acceptance of the draft before."""

import numpy as np

from decode.base.errors import require_fits
from decode.lengths import POLICIES, Policy
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
