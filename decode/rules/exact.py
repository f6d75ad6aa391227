"""Exact match: a drafted token stays while it is the very token the target emits there."""

import torch
from torch import Tensor

from decode.draft import Draft
from decode.rules import RULES, Rule, Verdict
from decode.rules.longest import longest_path
from decode.sampling import Noise
from decode.scores import Scores


@RULES.register("exact")
class ExactMatch(Rule):
    """The target emits one token per row of logits (greedy: the argmax; else one draw), and the
    draft only tells how many of those tokens are already known to be on one path. Lossless by
    construction, on any tree; for greedy decoding it is what every lossless rule comes to.
    """

    lossless, trees = True, True

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        rows, nodes = draft.tokens.shape
        device = draft.tokens.device
        greedy = scores.sampling.greedy
        emitted = scores.pick(
            scores.logits if greedy else noise.of_text(_depths(draft))
        )  # [B, N+1]
        if nodes == 0:
            zero = torch.zeros(rows, dtype=torch.int64, device=device)
            return Verdict(draft.tokens, zero, zero, emitted[:, 0])
        matches = draft.tokens == emitted.gather(1, draft.parent_rows())
        path, accepted, reached, last_row = longest_path(draft, matches)
        return Verdict(path, accepted, reached, emitted.gather(1, last_row[:, None])[:, 0])


def _depths(draft: Draft) -> Tensor:
    """int64 [B, N+1]: how far behind the committed text the token stands that follows the context
    of each row of p."""
    rows, nodes = draft.tokens.shape
    if draft.is_chain:
        return torch.arange(nodes + 1, device=draft.tokens.device).expand(rows, -1)
    return torch.nn.functional.pad(draft.ancestors().sum(2), (1, 0))
