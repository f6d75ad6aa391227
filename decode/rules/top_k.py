"""Blockwise decoding's relaxed acceptance (1811.03115, sections 5.1 and 5.3), with SpecDec's limit
(2203.16487). LOSSY."""

import torch

from decode.base.errors import require_fits, require_whole
from decode.draft import Draft
from decode.draw.random_numbers import CounterRNG
from decode.rules import RULES, Rule
from decode.rules.exact import longest_path
from decode.verdict import Decision, Scores


@RULES.register("top_k")
class TopKAcceptance(Rule):
    """Lossy, at any temperature: accepts a token if it is among the target's `k` likeliest. The
    first `min_accepted` tokens of a draft are always accepted. (The paper's minimum block has one
    more: the target's token.) The longest accepted path wins. The token after it is the target's.

    tolerance: τ, in nats. A token must also have log p ≥ max log p − τ, at temperature 1 (SpecDec's
    rule; k is its β). None: no limit.

    With k = 1 and min_accepted = 0 it is exact match of greedy text. Raises UserError for k < 1,
    min_accepted < 0 or tolerance < 0.
    """

    lossless, trees, exact_when_greedy = False, True, False

    def __init__(self, k: int = 2, min_accepted: int = 0, tolerance: float | None = None) -> None:
        require_whole(k=k)
        require_whole(0, min_accepted=min_accepted)
        require_fits(lambda x: x is None or x >= 0, "nats, a number ≥ 0", tolerance=tolerance)
        self.k, self.min_accepted, self.tolerance = k, min_accepted, tolerance

    def decide(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Decision:
        row_B1 = torch.arange(len(draft.tokens), device=draft.tokens.device)[:, None]
        logits = scores.logits[row_B1, draft.parent_rows()]  # [B, N, V]
        drafted = logits.gather(2, draft.tokens[..., None])
        passes = (logits > drafted).sum(2) < self.k
        if self.tolerance is not None:
            passes &= logits.amax(2) - drafted[..., 0] <= self.tolerance
        passes |= draft.ancestors().sum(2) <= self.min_accepted
        passes &= drafted[..., 0].isfinite()  # a masked token is no token of the text
        path, accepted, reached, last_row = longest_path(draft, passes)
        picked = scores.sampling.pick(scores.logits_at(last_row), rng.of_next(accepted))
        return Decision(path=path, accepted=accepted, reached=reached, next_token=picked)
