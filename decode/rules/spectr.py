"""SpecTr's k-sequential selection (Sun et al., 2310.15141)."""

import torch
from torch import Tensor

from decode.draft import Draft
from decode.rules import RULES
from decode.rules.descent import Descent
from decode.rules.residual import residual

# ρ to (k − 1)·2⁻¹⁶. Any ρ that the bisection ends at is lossless; a coarse one accepts less.
HALVINGS = 16


@RULES.register("spectr")
class SpecTr(Descent):
    """Of a node's k children, all drawn independently from one q, the first is accepted that passes
    with probability min(1, p(x)/(ρ·q(x))). With β = Σ min(q, p/ρ) one of them passes with
    probability 1 − (1−β)ᵏ, ρ in [1, k] is the least with 1 − (1−β)ᵏ ≤ ρβ, and if none passes the
    next token has weights p − min(q, p/ρ)·(1 − (1−β)ᵏ)/β. With one child it is speculative
    sampling. Children of different q's would need another rule.
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
        # How often any child is accepted for each time that one is; without children 0.
        share = torch.where(beta > 0, _any_of(beta, count) / beta, 0.0)
        return child, residual(p, each * share[:, None].float())[0]

    @staticmethod
    def _rho(p: Tensor, q: Tensor, count: Tensor, most: int) -> Tensor:
        """float64 [B]: ρ of each row, given how many children it has, int64 [B]."""
        low = torch.ones(len(p), dtype=torch.float64, device=p.device)
        if most == 1:
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
