"""SpecTr's k-sequential selection (Sun et al., 2310.15141)."""

import torch
from torch import Tensor

from decode.draft import Draft
from decode.rules import RULES
from decode.rules.multi_round import Descent
from decode.rules.speculative import residual

# The precision of ρ is (k − 1)·2⁻¹⁶. Any resulting ρ is lossless; a coarse one accepts less.
HALVINGS = 16


@RULES.register("spectr")
class SpecTr(Descent):
    """The k children of a node are drawn independently from one q. Each passes with probability
    min(1, p(x)/(ρ·q(x))), and the first that passes is accepted. With β = Σ min(q, p/ρ), at least
    one passes with probability 1 − (1−β)ᵏ. ρ is the least value in [1, k] with 1 − (1−β)ᵏ ≤ ρβ. If
    no child passes, the next token has the weights p − min(q, p/ρ)·(1 − (1−β)ᵏ)/β. With one child
    it is speculative sampling. Children with different q's need another rule.
    """

    lossless = True
    siblings = frozenset({"independent"})

    def judge(
        self, p: Tensor, children: Tensor, draft: Draft, uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        if not draft.tokens.shape[1]:
            return children[:, 0], p
        count = (children >= 0).sum(1)
        nodes = children.clamp(min=0)
        tokens = draft.tokens.gather(1, nodes)
        q = draft.q_of(nodes[:, 0], p.shape[1])[0]
        rho = self._rho(p, q, count, children.shape[1])
        p_x = p.gather(1, tokens).double()
        q_x = q.gather(1, tokens).double()
        stays = (uniforms.gather(1, nodes) * q_x * rho[:, None] < p_x) & (children >= 0)
        first = stays.long().argmax(1)[:, None]
        child = torch.where(stays.any(1), children.gather(1, first)[:, 0], -1)

        each = torch.minimum(q, p / rho[:, None].float())
        beta = each.sum(1, dtype=torch.float64)
        # P(any child is accepted) / P(one given child passes). Without children 0.
        share = torch.where(beta > 0, _any_of(beta, count) / beta, 0.0)
        return child, residual(p, each * share[:, None].float())[0]

    @staticmethod
    def _rho(p: Tensor, q: Tensor, count: Tensor, max_children: int) -> Tensor:
        """float64 [B]: ρ of each row. count: int64 [B], the number of children."""
        low = torch.ones(len(p), dtype=torch.float64, device=p.device)
        if max_children == 1:
            return low
        high = count.clamp(min=1).double()
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            beta = torch.minimum(q, p / middle[:, None].float()).sum(1, dtype=torch.float64)
            enough = _any_of(beta, count) <= middle * beta
            low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
        return high


def _any_of(beta: Tensor, count: Tensor) -> Tensor:
    """1 − (1−β)ᵏ."""
    return 1.0 - (1.0 - beta).clamp(min=0.0) ** count
