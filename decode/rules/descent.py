"""The walk of rules that judge a tree from the root down, siblings before their children.

Shapes: B rows, N nodes, K children of a node at most, V vocabulary.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from decode.draft import Draft
from decode.logits import Scores
from decode.rules import Rule, Verdict
from decode.rules.residual import settled
from decode.sampling import CounterRNG, draw


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

    def verify(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        rows, nodes = draft.tokens.shape
        device = draft.tokens.device
        table = draft.children()
        uniforms = rng.uniforms(CounterRNG.ACCEPT, 0, nodes)
        row = torch.arange(rows, device=device)
        at = torch.zeros(rows, dtype=torch.int64, device=device)  # the row of p
        accepted = torch.zeros_like(at)
        going = torch.ones(rows, dtype=torch.bool, device=device)
        path: list[Tensor] = []
        weights = torch.zeros(0, device=device)
        deepest = draft.nodes_by_depth().shape[1]
        for depth in range(deepest + 1):
            p = scores.probs_at(at)
            child, left = self.judge(p, table[row, at], draft, uniforms)
            weights = left if depth == 0 else torch.where(going[:, None], left, weights)
            going = going & (child >= 0)
            if depth == deepest or settled(going):
                break
            path.append(child.clamp(min=0))
            accepted = accepted + going
            at = torch.where(going, child + 1, at)
        went_on = (table[row, at] >= 0).any(1)
        return Verdict(
            torch.stack(path, 1) if path else draft.tokens[:, :0],
            accepted,
            accepted + went_on,
            draw(weights, rng.uniforms(CounterRNG.NEXT, 0, 1)[:, 0]),
        )
