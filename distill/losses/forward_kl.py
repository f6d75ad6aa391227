"""Forward KL from the target to the drafter."""

import torch.nn.functional as F
from torch import Tensor

from distill.losses import LOSSES, Loss


def forward_kl(student: Tensor, teacher: Tensor | None, labels: Tensor) -> Tensor:
    """KL(p‖q) = Σ p (log p − log q), p the target's and q the drafter's distribution.

    The drafter must cover whatever the target may say. By Pinsker TV ≤ √(KL/2), so the acceptance
    rate of speculative sampling, 1 − TV, is at least 1 − √(KL/2) (DistillSpec, 2310.08461).
    """
    assert teacher is not None
    return F.kl_div(
        student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)


LOSSES.register("forward_kl")(Loss(forward_kl, needs_teacher=True))
