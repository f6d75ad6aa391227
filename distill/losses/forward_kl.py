"""The forward KL (DistillSpec, 2310.08461)."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from distill.losses import LOSSES, Loss, LossRows


@LOSSES.register("forward_kl")
@dataclass(frozen=True)
class ForwardKL(Loss):
    """KL(p‖q) = Σ p (log p − log q): the drafter must cover every token the target may choose.

    Pinsker's inequality gives TV ≤ √(KL/2), so the acceptance rate 1 − TV is at least 1 − √(KL/2)
    (DistillSpec, 2310.08461). The gradient in the logits is q − p.
    """

    def value(self, rows: LossRows) -> Tensor:
        return F.kl_div(rows.log_q, rows.log_p, log_target=True, reduction="none").sum(-1)

    def fused(self, rows: LossRows) -> tuple[Tensor, Tensor]:
        gradient = rows.q - rows.p
        # Σ (q − p) is 0 except for the rounding errors of the two normalisations. In float32 these
        # errors would be larger than a small KL. Adding q − p to each summand cancels them.
        return gradient.addcmul(rows.p, rows.log_p - rows.log_q).sum(-1), gradient
