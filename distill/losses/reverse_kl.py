"""The reverse KL (MiniLLM, 2306.08543)."""

from dataclasses import dataclass

from torch import Tensor

from distill.losses import LOSSES, Loss, LossRows


@LOSSES.register("reverse_kl")
@dataclass(frozen=True)
class ReverseKL(Loss):
    """KL(q‖p) = Σ q (log q − log p): the drafter must avoid tokens the target would not choose.

    It concentrates on the target's most likely tokens. This suits drafters too small to cover all
    of them (MiniLLM, 2306.08543). The gradient in the logits is q (log q − log p − KL).
    """

    def value(self, rows: LossRows) -> Tensor:
        return (rows.log_q.exp() * (rows.log_q - rows.log_p)).sum(-1)

    def fused(self, rows: LossRows) -> tuple[Tensor, Tensor]:
        ratio = rows.log_q - rows.log_p
        # + (p − q), which sums to 0: see `ForwardKL`.
        values = (rows.q * ratio + (rows.p - rows.q)).sum(-1)
        return values, ratio.sub_(values[:, None]).mul_(rows.q)
