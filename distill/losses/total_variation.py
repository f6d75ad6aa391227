"""The total variation, 1 − α (DistillSpec, 2310.08461)."""

from dataclasses import dataclass

from torch import Tensor

from distill.losses import LOSSES, Loss, LossRows


@LOSSES.register("total_variation")
@dataclass(frozen=True)
class TotalVariation(Loss):
    """TV(p, q) = ½ Σ |p − q| = 1 − α; α is the acceptance rate of speculative sampling at T = 1.

    This is the objective itself (DistillSpec's TVD, 2310.08461), but it is flat where p and q
    hardly overlap. Its gradient in the logits is q (s − Σ q s) with s = ½ sign(q − p), which is
    small where q is small. Start from a drafter that already agrees with the target to some degree.
    """

    def value(self, rows: LossRows) -> Tensor:
        return 0.5 * (rows.log_p.exp() - rows.log_q.exp()).abs().sum(-1)

    def fused(self, rows: LossRows) -> tuple[Tensor, Tensor]:
        difference = rows.q - rows.p
        values = 0.5 * difference.abs().sum(-1)
        slope = difference.sign_().mul_(0.5).mul_(rows.q)
        return values, slope.sub_(rows.q * slope.sum(-1, keepdim=True))
