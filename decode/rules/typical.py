"""Typical acceptance (Medusa, 2401.10774, section 2.3.1). LOSSY."""

import torch
from torch import Tensor

from decode.base.device import reads_are_free
from decode.base.errors import UserError
from decode.draft import Draft
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import draw
from decode.rules import RULES, Rule
from decode.verdict import Decision, Scores


@RULES.register("typical")
class TypicalAcceptance(Rule):
    """Lossy: accepts a token if p(x) > min(ε, δ·exp(−H(p))), where H is the entropy of p in nats.
    So less likely tokens pass if the target is uncertain. The longest accepted path wins; among
    several, the likeliest under p. The next token is drawn from p. Trees of any kind.

    epsilon: ε in (0, 1]; delta: δ > 0. Raises UserError outside these ranges.
    """

    lossless, trees = False, True

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        if not 0 < epsilon <= 1:
            raise UserError(f"epsilon is {epsilon}; expected a number in (0, 1]")
        if not delta > 0:
            raise UserError(f"delta is {delta}; expected a number > 0")
        self.epsilon, self.delta = epsilon, delta

    def decide(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Decision:
        above, valid = draft.parent_rows(), draft.valid()
        computes_few = reads_are_free(draft.tokens.device)
        depth, log_p = (self._by_level if computes_few else self._all_nodes)(draft, scores)
        accepted = depth.amax(1)
        longest = depth == accepted[:, None]
        last = torch.where(longest, log_p, -torch.inf).argmax(1)
        went_on = ((above == last[:, None]) & valid).any(1)
        next_token = draw(scores.probs_at(last), rng.of_next(accepted))
        return Decision(
            path=draft.path_to(last - 1),
            accepted=accepted,
            reached=accepted + went_on,
            next_token=next_token,
        )

    def _bound(self, p: Tensor) -> Tensor:
        """[...]: what a token must exceed, for distributions p [..., V]."""
        entropy = torch.special.entr(p).sum(-1)
        return (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)

    def _by_level(self, draft: Draft, scores: Scores) -> tuple[Tensor, Tensor]:
        """For each row of p: its depth, int64 [B, N+1], −1 if its path is not accepted; and the
        path's log p, float64 [B, N+1]. Few nodes of a large tree are accepted, and only their
        children are checked."""
        rows, nodes = draft.tokens.shape
        above, valid = draft.parent_rows(), draft.valid()
        depth = torch.full((rows, nodes + 1), -1, dtype=torch.int64)
        depth[:, 0] = 0
        log_p = torch.zeros(rows, nodes + 1, dtype=torch.float64)
        for level in range(draft.levels()):
            row, node = ((depth.gather(1, above) == level) & valid).nonzero(as_tuple=True)
            parent = above[row, node]
            flat, which = (row * (nodes + 1) + parent).unique(return_inverse=True)
            p = scores.probs_of(flat // (nodes + 1), flat % (nodes + 1))
            p_x = p[which, draft.tokens[row, node]]
            stays = p_x > self._bound(p)[which]
            row, node, parent = row[stays], node[stays], parent[stays]
            depth[row, node + 1] = level + 1
            log_p[row, node + 1] = log_p[row, parent] + p_x[stays].double().log()
        return depth, log_p

    def _all_nodes(self, draft: Draft, scores: Scores) -> tuple[Tensor, Tensor]:
        """The same, from the distributions of all nodes. The shapes do not depend on values."""
        above, ancestors = draft.parent_rows(), draft.ancestors()
        p = scores.probs()
        row_B1 = torch.arange(len(above), device=above.device)[:, None]
        p_x = p[row_B1, above, draft.tokens]
        passes = (p_x > self._bound(p).gather(1, above)) & draft.valid()
        stays = passes & ~(ancestors & ~passes[:, None, :]).any(2)
        depth = torch.where(stays, ancestors.sum(2), -1)
        log_p = torch.where(ancestors, p_x.double().log()[:, None, :], 0.0).sum(2)
        return torch.nn.functional.pad(depth, (1, 0)), torch.nn.functional.pad(log_p, (1, 0))
