"""Loss weights of a draft's places, by how likely a draft gets there.

A place counts only if all places before it are right. Fixed weights such as 0.8^d guess how often
that is. D-PACE (2605.18810) computes it from the drafter's own probabilities: a place gets weight
as soon as the places before it are learnt. PARD-2 (2605.08632) computes it from the target's.

Shapes: B rows, T tokens, n predictions, H hidden size, R rank, V' draft vocabulary.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear

from distill.teacher.teacher_signal import Teacher


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


@torch.no_grad()
def label_shares(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    chunk: int,
    added: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """float32 [n]: the drafter's probability of each label, 0 for a label of −100.

    states: [n, H]. weight, bias: those of the output layer, [V', H] and [V']. labels: int64 [n],
    its rows. chunk: the number of predictions whose logits exist at once. added: rows [n, R] and
    weight [V', R], whose product is added to the logits.
    """
    shares = torch.zeros(labels.shape, device=labels.device)
    for begin in range(0, len(labels), chunk):
        part = slice(begin, begin + chunk)
        logits = linear(states[part], weight, bias)
        if added is not None:
            rows, added_weight = added
            logits = logits + linear(rows[part], added_weight)
        log_q = logits.float().log_softmax(-1)
        shares[part] = log_q.gather(1, labels[part].clamp(min=0)[:, None])[:, 0].exp()
    shares[labels < 0] = 0.0
    return shares


@torch.no_grad()
def teacher_shares(teacher: Teacher, labels: Tensor, rows: int, *, chunk: int) -> Tensor:
    """float64 [n]: the teacher's probability of each label, 0 for a label of −100.

    labels: int64 [n], rows of the drafter's output layer, of which there are `rows`. A label
    outside of a cache's likeliest tokens counts as all of those together.
    """
    shares = torch.zeros(labels.shape, dtype=torch.float64, device=labels.device)
    for begin in range(0, len(labels), chunk):
        part = slice(begin, begin + chunk)
        certain = torch.full((len(labels[part]), rows), -torch.inf, device=labels.device)
        certain.scatter_(1, labels[part].clamp(min=0)[:, None], 0.0)
        # Which outcome of the signal is the label.
        log_q, log_p = teacher(part).outcomes(certain, 1.0)
        shares[part] = (log_q.exp() * log_p.exp()).sum(-1).double()
    shares[labels < 0] = 0.0
    return shares
