"""Loss weights of a draft's places that follow the training (D-PACE, 2605.18810).

A place counts only if all places before it are right. Fixed weights such as 0.8^d guess how often
that is. These weights compute it from the drafter's own probabilities: a place gets weight as soon
as the places before it are learnt.

Shapes: B rows, T tokens.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


def place_weights(shares: Mapping[int, Tensor], smoothing: float) -> dict[int, Tensor]:
    """w_j = Σ_{m ≥ j} Π_{i ≤ m} ((1 − a)·q_i + a): [B, T] for each depth j.

    shares: by depth i, [B, T]: q_i, the drafter's probability of the text's token; NaN where the
    token is not trained. Such a place has factor 1 in the product and weight 0. smoothing: a, from
    0 to 1, keeps the later places from weight 0 at the start of a training.
    """
    reached, products = None, {}
    for depth in sorted(shares):
        trained = ~shares[depth].isnan()
        factor = torch.where(trained, (1 - smoothing) * shares[depth] + smoothing, 1.0)
        reached = factor if reached is None else reached * factor
        products[depth] = torch.where(trained, reached, 0.0)
    weights, later = {}, torch.zeros(())
    for depth in sorted(shares, reverse=True):
        later = later.to(products[depth]) + products[depth]
        weights[depth] = later
    return weights
