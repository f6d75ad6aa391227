"""Exact match: a draft token is accepted if it is exactly the token the target emits there."""

import torch
from torch import Tensor

from decode.draft import Draft
from decode.logits import Scores
from decode.rules import RULES, Rule, Verdict
from decode.rules.longest import longest_path
from decode.sampling import CounterRNG


@RULES.register("exact")
class ExactMatch(Rule):
    """The target emits one token per row of logits (greedy: the argmax; otherwise one draw). The
    draft only decides how many of these tokens lie on one path and can be emitted together.
    Lossless by construction, on any tree. In greedy decoding every lossless rule is equal to it.
    """

    lossless, trees = True, True

    def verify(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        rows, nodes = draft.tokens.shape
        device = draft.tokens.device
        greedy = scores.sampling.greedy
        emitted = scores.pick(scores.logits if greedy else rng.of_text(_depths(draft)))  # [B, N+1]
        if nodes == 0:
            zero = torch.zeros(rows, dtype=torch.int64, device=device)
            return Verdict(draft.tokens, zero, zero, emitted[:, 0])
        matches = draft.tokens == emitted.gather(1, draft.parent_rows())
        path, accepted, reached, last_row = longest_path(draft, matches)
        return Verdict(path, accepted, reached, emitted.gather(1, last_row[:, None])[:, 0])


def _depths(draft: Draft) -> Tensor:
    """int64 [B, N+1]: for each row of p, the offset of its next token from the end of the committed
    text."""
    rows, nodes = draft.tokens.shape
    if draft.is_chain:
        return torch.arange(nodes + 1, device=draft.tokens.device).expand(rows, -1)
    return torch.nn.functional.pad(draft.ancestors().sum(2), (1, 0))
