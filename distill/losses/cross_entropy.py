"""The cross-entropy of the text (SeqKD, 1606.07947)."""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from distill.losses import IGNORED, LOSSES, Loss, LossRows


@LOSSES.register("cross_entropy")
@dataclass(frozen=True)
class CrossEntropy(Loss):
    """−log q(label): SeqKD (Kim and Rush, 1606.07947) if the target generated the labels.

    Needs no teacher forward. On text that the target generated greedily, it raises the chance that
    the drafter's argmax equals the target's. A label of −100 is ignored.
    """

    needs_teacher: ClassVar[bool] = False

    def value(self, rows: LossRows) -> Tensor:
        return F.nll_loss(rows.log_q, rows.labels, ignore_index=IGNORED, reduction="none")

    def fused(self, rows: LossRows) -> tuple[Tensor, Tensor]:
        counted = (rows.labels != IGNORED)[:, None]
        labels = rows.labels.clamp(min=0)[:, None]
        values = -rows.log_q.gather(1, labels) * counted
        gradient = rows.q * counted
        gradient.scatter_add_(1, labels, -counted.to(gradient.dtype))
        return values[:, 0], gradient
