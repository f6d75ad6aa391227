"""The draft tokens of all rows together that give the most tokens per second by measured costs."""

from types import MappingProxyType

import numpy as np

from decode.lengths import POLICIES
from decode.lengths.cost_model import CostModel
from decode.verification import Verification

# A row's own results count as much as the batch's after this number of expected tokens.
OWN = 2.0


@POLICIES.register("worth")
class Worth(CostModel):
    """Drafts and feeds a token if its chance of being accepted is worth more than its cost.

    The chance of a token is the product of the acceptance at its position and at those before it in
    its row. The chances of all rows compete. For each greatest depth D, tokens are taken in the
    order of their chances. What is drafted is the set with the largest
    (B + Σ chances) / (draft(D) + v(B + tokens)). That is the optimum, because a draft costs by its
    depth and a pass by its tokens. Sequoia (2402.12374) and EAGLE-2 (2406.16858) choose the nodes
    of one row so; here tokens have a price. Rows draft to different depths, which costs no padding
    (`decode.model.cache.real_tokens`).

    The acceptance of a row at a position is that of the batch, times how much more or less than
    that this row accepted. Both forget: a row that rests gets the acceptance of the batch again.
    How costs are measured, and how often a drafter that does not pay is tried again, is that of
    `cost_model`. The depths are chosen before tokens are drawn, so every lossless rule keeps its
    law.
    """

    per_row = MappingProxyType({"_kept": 0.0, "_due": 0.0})
    _kept: np.ndarray  # [B]: tokens that were accepted
    _due: np.ndarray  # [B]: those that the batch's acceptance made expect

    def _best(self) -> np.ndarray:
        own = (self._kept + OWN) / (self._due + OWN)
        chances = np.minimum(own[:, None] * self._acceptance(), 1.0).cumprod(1)
        depths, most = np.zeros(self.rows, dtype=np.int64), self.rows / self._seconds_of(0, 0)
        for deepest in range(1, self.max_depth + 1):
            every = chances[:, :deepest].flatten()
            order = np.argsort(-every, kind="stable")  # of a row, the shallow ones first
            gained = self.rows + every[order].cumsum()
            rates = gained / self._seconds_of(deepest, np.arange(1, len(order) + 1))
            best = int(rates.argmax())
            if rates[best] > most:
                most = rates[best]
                depths = np.bincount(order[: best + 1] // deepest, minlength=self.rows)
        return depths

    def _seconds_of(self, depth: int, tokens: np.ndarray | int) -> np.ndarray:
        """float64, same shape as `tokens`: of a step with so many tokens of drafts so deep."""
        passes = self._passes(self.rows + self._nodes * np.asarray(tokens))
        assert passes is not None
        return self._drafts(depth) + passes

    def observe(self, verification: Verification) -> None:
        expected = self._acceptance()
        super().observe(verification)
        faded = self.memory**verification.emitted
        self._kept, self._due = self._kept * faded, self._due * faded
        if verification.draft_steps:
            tried, kept = self._outcomes(verification)
            self._kept += kept.sum(1)
            self._due += tried @ expected
