"""The draft tokens of all rows together that give the most tokens per second by measured costs."""

from types import MappingProxyType

import numpy as np

from decode.draft import Draft
from decode.lengths import POLICIES
from decode.lengths.cost_model import CostModel
from decode.verification import Verification

# A row's own results count as much as the batch's after this number of expected tokens, and those
# of drafts that were found by as many tokens as much as those of all.
OWN = 2.0
# Longer matches count together. Their results are remembered so many times as long as others.
LONGEST, LONGER = 7, 4
# Drafts that cost at most this share of a pass are made before it is chosen what of them is fed.
# After so many in vain, they are made in one pass of so many.
FREE, IN_VAIN, RARELY = 0.03, 8, 4


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

    Chains that were looked up cost next to nothing before they are fed. So they are made first, and
    then the tokens are chosen: a token's chance is that of drafts that were found by as many tokens
    of the text. These tokens were not drawn, so no rule minds which are left out.
    How costs are measured, and how often a drafter that does not pay is tried again, is that of
    `cost_model`. The depths are chosen before tokens are drawn, so every lossless rule keeps its
    law.
    """

    per_row = MappingProxyType({"_kept": 0.0, "_expected_of": 0.0})
    _kept: np.ndarray  # [B]: tokens that were accepted
    _expected_of: np.ndarray  # [B]: those that the batch's acceptance made expect

    def __init__(
        self,
        max_depth: int = 8,
        memory: float = 0.97,
        probe_share: float = 0.03,
        patience: int = 24,
    ) -> None:
        super().__init__(max_depth, memory, probe_share, patience)
        # Of looked-up tokens, by the length of the match and the position: accepted and tried.
        self._found = np.zeros((2, LONGEST + 1, max_depth))
        self._sure: np.ndarray | None = None  # int [B]: of the last draft, if it was looked up
        self._looked_up = False
        self._in_vain = 0  # drafts since one was fed, and after IN_VAIN the passes

    def fed(self, draft: Draft) -> np.ndarray:
        self._looked_up = draft.sure is not None and draft.q is None and draft.is_chain
        if not self._looked_up or not draft.sizes.any():
            return draft.sizes
        assert draft.sure is not None
        self._sure = np.minimum(draft.sure, LONGEST)
        width, count = draft.tokens.shape[1], int(draft.sizes.sum())
        chances = self._chances()[self._sure, :width].cumprod(1)
        chances[np.arange(width) >= draft.sizes[:, None]] = -1.0  # after all that is there
        chances = chances.flatten()
        order = np.argsort(-chances, kind="stable")[:count]
        gained = self.rows + np.append(0.0, chances[order].cumsum())
        passes = self._passes(self.rows + np.arange(count + 1))
        assert passes is not None
        best = int((gained / passes).argmax())
        if not best and self._due(passes[1] / passes[0] - gained[1] / gained[0]):
            best = 1
        self._in_vain = 0 if best else max(self._in_vain, min(self._in_vain + 1, IN_VAIN))
        return np.bincount(order[:best] // width, minlength=self.rows)

    def _chances(self) -> np.ndarray:
        """float64 [LONGEST + 1, max_depth]: of looked-up tokens, if those before are accepted."""
        kept, tried = self._found
        every = np.empty(self.max_depth)
        before = self._acceptance()[0]
        for at, (some, of) in enumerate(zip(kept.sum(0), tried.sum(0), strict=True)):
            every[at] = before = (some + before) / (of + 1)
        chances: np.ndarray = (kept + OWN * every) / (tried + OWN)
        return chances

    def _best(self) -> np.ndarray:
        plain = self._passes(np.array([self.rows]))
        if self._looked_up and plain is not None and self._drafts(self.max_depth) < FREE * plain[0]:
            if self._in_vain >= IN_VAIN:
                self._in_vain += 1
            rests = self._in_vain > IN_VAIN and self._in_vain % RARELY
            return np.full(self.rows, 0 if rests else self.max_depth)
        own = (self._kept + OWN) / (self._expected_of + OWN)
        chances = np.minimum(own[:, None] * self._acceptance(), 1.0).cumprod(1).flatten()
        order = np.argsort(-chances, kind="stable")  # of a row, the shallow ones first
        passes = self._passes(self.rows + self._nodes * np.arange(len(order) + 1))
        assert passes is not None
        # By the greatest depth D and the last token in this order: no token deeper than D is taken.
        deepest = np.arange(1, self.max_depth + 1)[:, None]
        taken = order % self.max_depth < deepest
        gained = self.rows + (chances[order] * taken).cumsum(1)
        drafts = np.array([[self._drafts(int(depth))] for depth in deepest[:, 0]])
        rates = gained / (drafts + passes[taken.cumsum(1)])
        place, last = np.unravel_index(rates.argmax(), rates.shape)
        if rates[place, last] <= self.rows / passes[0]:
            return np.zeros(self.rows, dtype=np.int64)
        rows = order[: last + 1][taken[place, : last + 1]] // self.max_depth
        return np.bincount(rows, minlength=self.rows)

    def observe(self, verification: Verification) -> None:
        expected = self._acceptance()
        super().observe(verification)
        if self._sure is not None and len(self._sure) == len(verification.rows):
            tried, kept = self._outcomes(verification.drafted, verification.accepted)
            same = np.arange(LONGEST + 1)[:, None] == self._sure
            self._found *= self.memory ** (float(verification.emitted.mean()) / LONGER)
            self._found += np.stack([same @ kept.astype(float), same @ tried.astype(float)])
            self._sure = None
        faded = self.memory**verification.emitted
        self._kept, self._expected_of = self._kept * faded, self._expected_of * faded
        if verification.draft_steps:
            tried, kept = self._outcomes(verification.depths, verification.accepted)
            self._kept += kept.sum(1)
            self._expected_of += tried @ expected
