"""A composite that asks the drafter which is worth most in each row.

Shapes: B rows, M drafters, D depths that are counted apart.
"""

from collections.abc import Sequence

import numpy as np

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.drafters.several.combined import CompositeDrafter
from decode.verification import Verification

# Acceptance is counted apart at depth 1, 2, …; what is deeper counts together at the last.
DEPTHS = 8
# What is assumed before any verification counts like this number of judged tokens.
PRIOR_WEIGHT = 1.0
# The cost of a draft: per token of depth, or its fixed part and that per token.
Cost = float | tuple[float, float]


class MeasuredComposite(CompositeDrafter):
    """As `CompositeDrafter`, but a row passes over a drafter if a later one is worth more to it.

    The worth of a drafter is the expected tokens of a step per cost of that step:
    (1 + Σᵢ Πⱼ≤ᵢ αⱼ)/(1 + f + c·n), i = 1 … n, for drafts n deep. αⱼ is the share of its tokens at
    depth j that this row's verifications accepted, among those whose predecessors were accepted.
    One more token counts with the share of depth j − 1 (at depth 1: `prior`). f + c·n is the cost
    of its draft. All of this is known before the draft, so decoding stays lossless. The choice
    depends on the row and the costs, and reads no clock.

    costs: the costs of each drafter, in passes of the target: c, the cost of one more token of
    depth (0 for a lookup), or both parts, (f, c), as `decode.costs.Costs` has them. prior: the
    acceptance before any verification. memory: in each step, past counts are multiplied by it. So a
    drafter that is passed over comes back to the prior, and is tried again.

    In a batch a drafter that some rows ask drafts for the others too, and costs leave this out.
    Raises UserError as `CompositeDrafter` does, for another number of costs than drafters, and for
    values out of range.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        costs: Sequence[Cost],
        *,
        prior: float = 0.7,
        memory: float = 0.95,
    ) -> None:
        super().__init__(drafters)
        if len(costs) != len(self.drafters):
            raise UserError(
                f"there are {len(costs)} costs for {len(self.drafters)} drafters; expected one for "
                "each"
            )
        parts = [cost if isinstance(cost, tuple) else (0.0, cost) for cost in costs]
        if min(map(min, parts)) < 0:
            raise UserError(f"costs are {list(costs)}; expected numbers ≥ 0")
        if not 0 < prior < 1 or not 0 < memory < 1:
            raise UserError(
                f"prior is {prior} and memory {memory}; expected numbers above 0 and below 1"
            )
        self.costs, self.prior, self.memory = parts, prior, memory
        self._counts = np.zeros((0, len(self.drafters), 2, DEPTHS))  # judged, accepted
        self.per_row = {"_counts": np.zeros(self._counts.shape[1:])}

    def with_drafters(self, drafters: Sequence[Drafter]) -> "MeasuredComposite":
        return MeasuredComposite(drafters, self.costs, prior=self.prior, memory=self.memory)

    def worth(self, depths: np.ndarray) -> np.ndarray:
        """float64 [B, M]: the worth of each drafter to each row. depths: int [B], the max depth of
        each row."""
        judged, accepted = self._counts[:, :, 0], self._counts[:, :, 1]
        rates = np.empty_like(judged)  # [B, M, D]
        before: np.ndarray | float = self.prior
        for depth in range(DEPTHS):
            before = rates[:, :, depth] = (accepted[:, :, depth] + PRIOR_WEIGHT * before) / (
                judged[:, :, depth] + PRIOR_WEIGHT
            )
        deepest = int(depths.max(initial=0))
        places = np.minimum(np.arange(deepest), DEPTHS - 1)
        inside = np.arange(deepest) < depths[:, None]  # [B, n]
        reached = rates[:, :, places].cumprod(2) * inside[:, None, :]
        fixed, per_depth = np.array(self.costs).T
        cost: np.ndarray = 1 + (fixed + per_depth * depths[:, None]) * (depths[:, None] > 0)
        worth: np.ndarray = (1 + reached.sum(2)) / cost
        return worth

    def asked(self, depths: np.ndarray) -> np.ndarray:
        worth = self.worth(depths)
        best_later = np.maximum.accumulate(worth[:, ::-1], axis=1)[:, ::-1]
        asked: np.ndarray = worth >= best_later
        return asked

    def observe(self, verification: Verification) -> None:
        super().observe(verification)
        took, self._took = self._took, np.zeros(0, dtype=np.int64)
        if not len(took):
            return
        rows = np.flatnonzero(took >= 0)
        taking = np.ones(len(took), dtype=bool)
        if verification.waits is not None:
            taking = ~verification.waits
        self._counts[taking] *= self.memory
        for place, many in enumerate((verification.reached, verification.accepted)):
            counts = np.clip(many[rows, None] - np.arange(DEPTHS), 0, 1)
            counts[:, -1] = np.maximum(many[rows] - (DEPTHS - 1), 0)
            self._counts[rows, took[rows], place] += counts
