"""The divergences between p and q: forward and reverse KL, Jensen–Shannon, total variation. And the
cross-entropy on the text."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from decode.errors import UserError
from distill.losses import IGNORED, LOSSES, Loss, Rows


@LOSSES.register("forward_kl")
@dataclass(frozen=True)
class ForwardKL(Loss):
    """KL(p‖q) = Σ p (log p − log q): the drafter must cover every token the target may choose.

    Pinsker's inequality gives TV ≤ √(KL/2), so the acceptance rate 1 − TV is at least 1 − √(KL/2)
    (DistillSpec, 2310.08461). The gradient in the logits is q − p.
    """

    def value(self, rows: Rows) -> Tensor:
        return F.kl_div(rows.log_q, rows.log_p, log_target=True, reduction="none").sum(-1)

    def fused(self, rows: Rows) -> tuple[Tensor, Tensor]:
        gradient = rows.q - rows.p
        # Σ (q − p) is 0 except for the rounding errors of the two normalisations. In float32 these
        # errors would be larger than a small KL. Adding q − p to each summand cancels them.
        return (rows.p * (rows.log_p - rows.log_q) + gradient).sum(-1), gradient


@LOSSES.register("reverse_kl")
@dataclass(frozen=True)
class ReverseKL(Loss):
    """KL(q‖p) = Σ q (log q − log p): the drafter must avoid tokens the target would not choose.

    It concentrates on the target's most likely tokens. This suits drafters too small to cover all
    of them (MiniLLM, 2306.08543). The gradient in the logits is q (log q − log p − KL).
    """

    def value(self, rows: Rows) -> Tensor:
        return (rows.log_q.exp() * (rows.log_q - rows.log_p)).sum(-1)

    def fused(self, rows: Rows) -> tuple[Tensor, Tensor]:
        ratio = rows.log_q - rows.log_p
        # + (p − q), which sums to 0: see `ForwardKL`.
        values = (rows.q * ratio + (rows.p - rows.q)).sum(-1)
        return values, ratio.sub_(values[:, None]).mul_(rows.q)


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

    def value(self, rows: Rows) -> Tensor:
        p, q = rows.log_p.exp(), rows.log_q.exp()
        log_m = (self.beta * p + (1 - self.beta) * q).log()
        return (
            self.beta * p * (rows.log_p - log_m) + (1 - self.beta) * q * (rows.log_q - log_m)
        ).sum(-1)

    def fused(self, rows: Rows) -> tuple[Tensor, Tensor]:
        # If p and q both round to 0, the smallest number keeps the logarithm finite.
        m = rows.q.lerp(rows.p, self.beta)
        log_m = m.clamp_(min=torch.finfo(m.dtype).tiny).log_()
        slope = (rows.log_q - log_m).mul_(1 - self.beta).mul_(rows.q)
        values = (rows.log_p - log_m).mul_(rows.p).mul_(self.beta).add_(slope).sum(-1)
        return values, slope.sub_(rows.q * slope.sum(-1, keepdim=True))


@LOSSES.register("total_variation")
@dataclass(frozen=True)
class TotalVariation(Loss):
    """TV(p, q) = ½ Σ |p − q| = 1 − α; α is the acceptance rate of speculative sampling at T = 1.

    This is the objective itself (DistillSpec's TVD, 2310.08461), but it is flat where p and q
    hardly overlap. Its gradient in the logits is q (s − Σ q s) with s = ½ sign(q − p), which is
    small where q is small. Start from a drafter that already agrees with the target to some degree.
    """

    def value(self, rows: Rows) -> Tensor:
        return 0.5 * (rows.log_p.exp() - rows.log_q.exp()).abs().sum(-1)

    def fused(self, rows: Rows) -> tuple[Tensor, Tensor]:
        difference = rows.q - rows.p
        values = 0.5 * difference.abs().sum(-1)
        slope = difference.sign_().mul_(0.5).mul_(rows.q)
        return values, slope.sub_(rows.q * slope.sum(-1, keepdim=True))


@LOSSES.register("cross_entropy")
@dataclass(frozen=True)
class CrossEntropy(Loss):
    """−log q(label): SeqKD (Kim and Rush, 1606.07947) if the target generated the labels.

    Needs no teacher forward. On text that the target generated greedily, it raises the chance that
    the drafter's argmax equals the target's. A label of −100 is ignored.
    """

    needs_teacher: ClassVar[bool] = False

    def value(self, rows: Rows) -> Tensor:
        return F.nll_loss(rows.log_q, rows.labels, ignore_index=IGNORED, reduction="none")

    def fused(self, rows: Rows) -> tuple[Tensor, Tensor]:
        counted = (rows.labels != IGNORED)[:, None]
        labels = rows.labels.clamp(min=0)[:, None]
        values = -rows.log_q.gather(1, labels) * counted
        gradient = rows.q * counted
        gradient.scatter_add_(1, labels, -counted.to(gradient.dtype))
        return values[:, 0], gradient
