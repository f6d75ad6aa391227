"""The generalised Jensen-Shannon divergence (GKD, 2306.13649)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from decode.base.errors import UserError
from distill.losses import LOSSES, Loss, LossRows


@LOSSES.register("jsd")
@dataclass(frozen=True)
class JSD(Loss):
    """β·KL(p‖m) + (1 − β)·KL(q‖m), m = β·p + (1 − β)·q (GKD, 2306.13649, eq. 1).

    It is bounded, so single tokens cannot dominate. Near β = 0 its gradient is β times the gradient
    of the forward KL. Near β = 1 it is 1 − β times the gradient of the reverse KL. The gradient in
    q is (1 − β)·log(q/m). Raises UserError unless 0 < β < 1.
    """

    beta: float = 0.5

    def __post_init__(self) -> None:
        if not (isinstance(self.beta, int | float) and 0 < self.beta < 1):
            raise UserError(
                f"loss jsd has beta {self.beta!r}; expected a number between 0 and 1 (its limits "
                "are the losses forward_kl and reverse_kl)"
            )

    def value(self, rows: LossRows) -> Tensor:
        p, q = rows.log_p.exp(), rows.log_q.exp()
        log_m = (self.beta * p + (1 - self.beta) * q).log()
        return (
            self.beta * p * (rows.log_p - log_m) + (1 - self.beta) * q * (rows.log_q - log_m)
        ).sum(-1)

    def fused(self, rows: LossRows) -> tuple[Tensor, Tensor]:
        # If p and q both round to 0, the smallest number keeps the logarithm finite.
        m = rows.q.lerp(rows.p, self.beta)
        log_m = m.clamp_(min=torch.finfo(m.dtype).tiny).log_()
        slope = (rows.log_q - log_m).mul_(1 - self.beta).mul_(rows.q)
        values = (rows.log_p - log_m).mul_(rows.p).mul_(self.beta).add_(slope).sum(-1)
        return values, slope.sub_(rows.q * slope.sum(-1, keepdim=True))
