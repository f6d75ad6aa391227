"""Exact match: a draft token is accepted if it is exactly the token the target emits there.

Shapes: B rows, N nodes, D depth.
"""

import torch
from torch import Tensor

from decode.draft import Draft
from decode.rules import RULES, Rule
from decode.sampling import CounterRNG, argmax
from decode.verification import Decision, Scores


def longest_path(draft: Draft, passes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(path, accepted, reached) as in `Decision`, and the position after the path, int64 [B].

    passes: bool [B, N]. A node is accepted if it and all its ancestors pass. If several paths have
    the same length, the one drafted first is taken.
    """
    passes = passes & draft.valid()
    rows, nodes = draft.tokens.shape
    if draft.is_chain or not nodes:
        accepted = passes.long().cumprod(1).sum(1)
        path = torch.arange(nodes, device=passes.device).expand(rows, -1)
        return path, accepted, torch.minimum(accepted + 1, draft.valid().sum(1)), accepted
    ancestors = draft.ancestors()
    stays = ((ancestors & ~passes[:, None, :]).sum(2) == 0) & passes
    accepted, last = (ancestors.sum(2) * stays).max(1)
    path = draft.path_to(torch.where(accepted > 0, last, -1))
    last_row = torch.where(accepted > 0, last + 1, 0)
    went_on = ((draft.parent_rows() == last_row[:, None]) & draft.valid()).any(1)
    return path, accepted, accepted + went_on, last_row


@RULES.register("exact")
class ExactMatch(Rule):
    """The target emits one token per row of logits (greedy: the argmax; otherwise one draw). The
    draft only decides how many of these tokens lie on one path and can be emitted together.
    Lossless by construction, on any tree. In greedy decoding every lossless rule is equal to it.
    """

    lossless, trees = True, True

    def decide(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Decision:
        emitted = self.draw(draft, scores, rng)
        matches = draft.tokens == emitted.gather(1, draft.parent_rows())
        path, accepted, reached, last_row = longest_path(draft, matches)
        return Decision(
            path=path,
            accepted=accepted,
            reached=reached,
            next_token=emitted.gather(1, last_row[:, None])[:, 0],
        )

    def draw(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Tensor:
        """int64 [B, N+1]: the token that the target emits at each position of the draft."""
        if scores.sampling.greedy:
            return argmax(scores.logits)
        return scores.pick(rng.of_text(depths_of_rows(draft)))


def depths_of_rows(draft: Draft) -> Tensor:
    """int64 [B, N+1]: for each row of p, the offset of its next token from the end of the committed
    text."""
    rows, nodes = draft.tokens.shape
    if draft.is_chain:
        return torch.arange(nodes + 1, device=draft.tokens.device).expand(rows, -1)
    return torch.nn.functional.pad(draft.ancestors().sum(2), (1, 0))
