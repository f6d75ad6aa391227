"""The residual of the target's distribution after a rejection; most rules share it."""

import torch
from torch import Tensor

# Replaces a divisor of 0 if only the sign of the quotient matters.
TINY = 1e-30


def residual(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """((p − q)₊, float32 [..., V], and its sum, float64 [...]) for weights p, q ≥ 0 [..., V].

    If p ≈ q leaves nothing in float32, the sum is 0 and the weights are p, the limit of the
    residual. The weights are also p if q of a broken drafter is NaN: its tokens are always
    rejected.
    """
    left = (p - q).clamp_(min=0)
    mass = left.sum(-1, dtype=torch.float64)
    empty = ~(mass > 0)
    if settled(empty):
        return left, mass
    return torch.where(empty[..., None], p, left), mass


def settled(open_: Tensor) -> bool:
    """Whether no row of open_, bool [B], is still open, so that a pass over them can be skipped.

    On an accelerator it always returns False, because the check costs more than the pass.
    """
    return open_.device.type == "cpu" and not open_.any()
