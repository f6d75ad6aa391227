"""Multi-round speculative sampling (SpecInfer, 2305.09781; Sequoia, 2402.12374), and the walk of
rules that judge a tree from the root down, siblings before their children.

Shapes: B rows, N nodes, K children of a node at most, V vocabulary.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from decode.base.device import surely_none
from decode.draft import Draft
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import draw
from decode.rules import RULES, Rule
from decode.rules.speculative import TINY, residual
from decode.verdict import Decision, Scores


class Descent(Rule):
    """In each row, the walk steps from the current node to the child that `judge` accepts. If no
    child is accepted, it ends with a draw from the weights that `judge` returns. Only the
    distributions at visited nodes are computed, at most one per depth and row.
    """

    trees = True

    @abstractmethod
    def judge(
        self, p: Tensor, children: Tensor, draft: Draft, uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(child, weights): child is int64 [B], the accepted child of each row, −1 for none.
        weights is [B, V], those of the next token in rows where no child is accepted.

        p: float32 [B, V], the target's distribution at the current node of each row. children:
        int64 [B, K], the node's children, −1 past the last. A row without children has the weights
        p. uniforms: float64 [B, N], one for each node.
        """

    def decide(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Decision:
        rows, nodes = draft.tokens.shape
        device = draft.tokens.device
        table = draft.children()
        uniforms = rng.uniforms(CounterRNG.ACCEPT, 0, nodes)
        row = torch.arange(rows, device=device)
        at = torch.zeros(rows, dtype=torch.int64, device=device)  # the row of p
        accepted = torch.zeros_like(at)
        going = torch.ones(rows, dtype=torch.bool, device=device)
        path: list[Tensor] = []
        weights = torch.zeros(0, dtype=torch.float32, device=device)
        levels = draft.levels()
        for depth in range(levels + 1):
            p = scores.probs_at(at)
            child, left = self.judge(p, table[row, at], draft, uniforms)
            weights = left if depth == 0 else torch.where(going[:, None], left, weights)
            going = going & (child >= 0)
            if depth == levels or surely_none(going):
                break
            path.append(child.clamp(min=0))
            accepted = accepted + going
            at = torch.where(going, child + 1, at)
        went_on = (table[row, at] >= 0).any(1)
        return Decision(
            path=torch.stack(path, 1) if path else draft.tokens[:, :0],
            accepted=accepted,
            reached=accepted + went_on,
            next_token=draw(weights, rng.of_next(accepted)),
        )


@RULES.register("multi_round")
class MultiRound(Descent):
    """Judges the children of a node in order: accepts x with probability min(1, p(x)/q(x)), or
    continues with its sibling and p ← norm((p − q)₊). If no child is accepted, the next token is
    drawn from the remaining p. Trees of any kind; on a chain it is speculative sampling.

    Siblings drawn without replacement: a rejected x is also removed from q, which is renormalised
    (Sequoia). Chosen siblings have q = 1 each: x is accepted with probability p(x), or removed
    from p.
    """

    lossless = True

    def judge(
        self, p: Tensor, children: Tensor, draft: Draft, uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        if not draft.tokens.shape[1]:
            return children[:, 0], p
        nodes = children.clamp(min=0)
        tokens, u = draft.tokens.gather(1, nodes), uniforms.gather(1, nodes)
        if draft.q is None:
            return self._chosen(p, children, tokens, u)
        child = torch.full_like(children[:, 0], -1)
        mass = torch.ones_like(u[:, 0])  # the sum of p, which is not normalised
        for k in range(children.shape[1]):
            open_ = (child < 0) & (children[:, k] >= 0)
            if surely_none(open_):
                break
            q, q_mass = draft.q_of(nodes[:, k], p.shape[1])
            token = tokens[:, k : k + 1]
            p_x, q_x = (weights.gather(1, token)[:, 0].double() for weights in (p, q))
            stays = open_ & (u[:, k] * q_x * mass < p_x * q_mass)
            child = torch.where(stays, children[:, k], child)
            rejected = open_ & ~stays
            if surely_none(rejected):
                break
            left, left_mass = residual(p, q * (mass / q_mass.clamp(min=TINY))[:, None].float())
            p = torch.where(rejected[:, None], left, p)
            mass = torch.where(rejected & (left_mass > 0), left_mass, mass)
        return child, p

    @staticmethod
    def _chosen(p: Tensor, children: Tensor, tokens: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Judges all siblings at once: for each, p lacks only the tokens of earlier siblings."""
        there = children >= 0
        # A token that is chosen twice has probability 0 the second time.
        again = (tokens[:, :, None] == tokens[:, None, :]) & there[:, None, :]
        p_x = p.gather(1, tokens).double() * (there & ~again.tril(-1).any(2))
        stays = u * (1.0 - (p_x.cumsum(1) - p_x)) < p_x
        first = stays.long().argmax(1)[:, None]
        child = torch.where(stays.any(1), children.gather(1, first)[:, 0], -1)
        out = torch.zeros_like(p).scatter_reduce_(1, tokens, there.to(p.dtype), "amax")
        return child, residual(p, out)[0]
