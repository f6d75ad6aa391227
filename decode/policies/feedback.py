"""The draft length follows the share of draft tokens that were accepted."""

import numpy as np

from decode.errors import UserError
from decode.policies import POLICIES, Policy
from decode.stats import Step


@POLICIES.register("feedback")
class Feedback(Policy):
    """γ = least + (most − least)·r, rounded. r is an EMA (exponential moving average) of la/k, the
    accepted tokens / draft tokens of one draft, per row.

    ema: the weight of the past. A text begins with r = `first`. A row without a draft keeps its r.
    """

    def __init__(self, most: int = 8, least: int = 1, ema: float = 0.7, first: float = 0.5) -> None:
        super().__init__(most)
        if not 1 <= least <= most:
            raise UserError(f"least is {least} and most is {most}; expected 1 ≤ least ≤ most")
        for name, value, fits in (("ema", ema, 0 <= ema < 1), ("first", first, 0 <= first <= 1)):
            if not fits:
                raise UserError(f"{name} is {value}; expected a number from 0 to 1 (ema below 1)")
        self.least, self.ema, self.first = least, ema, first
        self._ratio = np.zeros(0)

    def start(self, rows: int) -> None:
        super().start(rows)
        self._ratio = np.full(rows, self.first)

    def depths(self) -> np.ndarray:
        lengths = self.least + (self.most - self.least) * self._ratio
        return np.floor(lengths + 0.5).astype(np.int64)

    def observe(self, step: Step) -> None:
        ratio = self.ema * self._ratio + (1 - self.ema) * step.kept_share()
        self._ratio = np.where(step.drafted > 0, ratio, self._ratio)

    def keep_rows(self, rows: np.ndarray) -> None:
        super().keep_rows(rows)
        self._ratio = self._ratio[rows]
