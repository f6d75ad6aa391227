"""Cross-entropy on the text itself; on the target's own text, sequence-level distillation."""

import torch.nn.functional as F
from torch import Tensor

from distill.losses import LOSSES, Loss


def cross_entropy(student: Tensor, teacher: Tensor | None, labels: Tensor) -> Tensor:
    """−log q(label): SeqKD (Kim and Rush, 1606.07947) when the labels are the target's words.

    Needs no teacher forward. Against text the target wrote greedily it raises the chance that the
    drafter's argmax is the target's.
    """
    return F.cross_entropy(student, labels, reduction="none")


LOSSES.register("cross_entropy")(Loss(cross_entropy, needs_teacher=False))
