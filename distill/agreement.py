"""Measures how well a drafter agrees with the target on a given text, without decoding.

Shapes: n predicted tokens, c tokens per chunk, V vocabulary, d draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from distill.teacher.signal import TeacherLogits


@dataclass(frozen=True)
class Agreement:
    """Means over the predicted tokens of a text.

    expected_acceptance: Σ min(p, q) = 1 − TV at temperature 1. p covers the full vocabulary, so
    probability on padding rows or outside a reduced draft vocabulary counts as lost. top1: how
    often the most likely token is the same; this is the acceptance rate of greedy decoding.
    lost_mass: the probability that p has outside the draft vocabulary.
    """

    expected_acceptance: float
    top1: float
    lost_mass: float

    @classmethod
    def from_sums(cls, sums: Tensor) -> "Agreement":
        """sums: the result of `agreement_sums`, added up over batches and ranks."""
        acceptance, top1, lost, count = sums.tolist()
        return cls(acceptance / count, top1 / count, lost / count)


@torch.no_grad()
def agreement_sums(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher: Callable[[slice], TeacherLogits],
    vocabulary: Tensor | None,
    *,
    chunk: int = 256,
) -> Tensor:
    """Return float64 [4]: sums of acceptance, top-1 matches and lost mass, and the count n.

    hidden: [n, H], weight: [d, H] and bias: [d] of the drafter. teacher(slice) returns the target's
    logits over its full vocabulary. vocabulary: int64 [d], the token ids of a reduced output layer;
    None means row i is token i.
    """
    sums = torch.zeros(4, dtype=torch.float64, device=hidden.device)
    for begin in range(0, len(hidden), chunk):
        part = slice(begin, begin + chunk)
        q = F.linear(hidden[part], weight, bias).float().softmax(-1)
        p = teacher(part).logits.float().softmax(-1)
        known = p[:, : q.shape[1]] if vocabulary is None else p[:, vocabulary]
        guess = q.argmax(-1)
        if vocabulary is not None:
            guess = vocabulary[guess]
        sums[0] += torch.minimum(known, q).sum(dtype=torch.float64)
        sums[1] += (guess == p.argmax(-1)).sum()
        sums[2] += (1 - known.sum(-1)).sum(dtype=torch.float64)
        sums[3] += len(q)
    return sums
