"""The losses that are made for the acceptance rate α = Σ min(p, q) = 1 − TV(p, q) itself: the LK
losses (2602.23881).

`total_variation` is 1 − α too, but its gradient almost vanishes where p and q hardly overlap. Both
losses here have a larger gradient there, so a drafter can begin with them.

Over a draft vocabulary p is renormalised, as for every loss. So α is that of drafting within this
vocabulary, and the mass of p outside it is not counted. Over the top k of a cache, α counts the
tail as one outcome and is never below the α of the vocabulary.

Shapes: n tokens, V outcomes, as in `distill.losses`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from decode.base.errors import UserError
from distill.losses import LOSSES, Loss, LossRows
from distill.losses.forward_kl import ForwardKL
from distill.losses.total_variation import TotalVariation


@LOSSES.register("negative_log_acceptance")
@dataclass(frozen=True)
class NegativeLogAcceptance(Loss):
    """−log α, the loss LK^α of 2602.23881: the negative log-likelihood of "accepted".

    It is −log(1 − TV) ≥ TV, and 0 only for p = q. Its gradient is TV's divided by α, so it stays
    large where α is small. For a p that is one token with certainty it is the cross-entropy. With
    the weights w = min(p, q)/α, and a = 1 where q < p, 0 where q > p and ½ where they are equal,
    the gradient in the logits is q Σ w a − w a.
    """

    def value(self, rows: LossRows) -> Tensor:
        return -torch.minimum(rows.log_q, rows.log_p).logsumexp(-1)

    def fused(self, rows: LossRows) -> tuple[Tensor, Tensor]:
        # In logarithms, so that no overlap is too small for float32.
        log_overlap = torch.minimum(rows.log_q, rows.log_p)
        log_alpha = log_overlap.logsumexp(-1)
        # −log α = log(1 + TV/α), because α + TV = 1. This form keeps the digits of a small TV.
        log_tv = (rows.q - rows.p).abs_().sum(-1).mul_(0.5).log_()
        values = F.softplus(log_tv - log_alpha)
        raised = (rows.log_p - rows.log_q).sign_().add_(1).mul_(0.5)
        raised.mul_(log_overlap.sub_(log_alpha[:, None]).exp_())
        return values, (rows.q * raised.sum(-1, keepdim=True)).sub_(raised)


@LOSSES.register("lk_hybrid")
@dataclass(frozen=True)
class LKHybrid(Loss):
    """λ·KL(p‖q) + (1 − λ)·TV(p, q), λ = exp(−η α): the loss LK^λ of 2602.23881.

    λ is computed for each token and is a constant for the gradient. Where p and q hardly overlap,
    KL pulls them together. Where they agree, TV raises α itself. η = 0 is the forward KL, and a
    large η the total variation. The paper's η is 3. Raises UserError for η < 0.
    """

    eta: float = 3.0

    def __post_init__(self) -> None:
        if isinstance(self.eta, bool) or not (isinstance(self.eta, int | float) and self.eta >= 0):
            raise UserError(f"loss lk_hybrid has eta {self.eta!r}; expected a number >= 0")

    def value(self, rows: LossRows) -> Tensor:
        tv = TotalVariation().value(rows)
        share = self._share_of_kl(tv.detach())
        return share * ForwardKL().value(rows) + (1 - share) * tv

    def fused(self, rows: LossRows) -> tuple[Tensor, Tensor]:
        kl, kl_gradient = ForwardKL().fused(rows)
        tv, tv_gradient = TotalVariation().fused(rows)
        share = self._share_of_kl(tv)
        return tv.lerp(kl, share), tv_gradient.lerp_(kl_gradient, share[:, None])

    def _share_of_kl(self, tv: Tensor) -> Tensor:
        """λ of each token, [n]. tv: the total variations, [n]."""
        return (tv - 1).mul_(self.eta).exp_()
