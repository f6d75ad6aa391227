"""What a rejection leaves of the target's distribution; the arithmetic that most rules share."""

import torch
from torch import Tensor

# Stands for a divisor of 0 where the quotient's sign is all that matters.
TINY = 1e-30


def residual(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """((p − q)₊, float32 [..., V], and its sum, float64 [...]) for weights p, q ≥ 0 [..., V].

    Where p ≈ q leaves nothing in float32 the sum is 0 and the weights are p, the residual's limit.
    So they are where a broken drafter's q is not a number: what it drafted was rejected for sure.
    """
    left = (p - q).clamp_(min=0)
    mass = left.sum(-1, dtype=torch.float64)
    empty = ~(mass > 0)
    if settled(empty):
        return left, mass
    return torch.where(empty[..., None], p, left), mass


def settled(open_: Tensor) -> bool:
    """Whether it is known that no row is open, bool [B], so that a pass over them can be left out.

    On an accelerator looking costs more than the pass, so there nothing is known.
    """
    return open_.device.type == "cpu" and not open_.any()
