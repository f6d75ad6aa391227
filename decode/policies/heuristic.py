"""Drafts get longer after full acceptance, and shorter otherwise."""

import numpy as np

from decode.errors import UserError
from decode.policies import POLICIES, Policy
from decode.stats import Step


@POLICIES.register("heuristic")
class Heuristic(Policy):
    """The length of a row grows by 2 if all its draft tokens were accepted, else it shrinks by 1,
    but stays at least 1. This is the schedule of assisted generation in `transformers`. A row
    without a draft keeps its length.

    first: the initial length for a text. Default: 5, or `most` if that is less.
    """

    def __init__(self, most: int = 8, first: int | None = None) -> None:
        super().__init__(most)
        self.first = min(5, most) if first is None else first
        if not 1 <= self.first <= most:
            raise UserError(f"first is {first}; expected a length from 1 to most, {most}")
        self._lengths = np.zeros(0, dtype=np.int64)

    def start(self, rows: int) -> None:
        super().start(rows)
        self._lengths = np.full(rows, self.first)

    def depths(self) -> np.ndarray:
        return self._lengths.copy()

    def observe(self, step: Step) -> None:
        whole = step.accepted >= step.longest()
        change = np.where(whole, 2, -1)
        lengths = np.clip(self._lengths + change, 1, self.most)
        self._lengths = np.where(step.drafted > 0, lengths, self._lengths)

    def keep_rows(self, rows: np.ndarray) -> None:
        super().keep_rows(rows)
        self._lengths = self._lengths[rows]
