"""What a teacher says about a few tokens, in the two forms there are.

A signal turns the drafter's log-probabilities over its vocabulary into those over the outcomes
that teacher and drafter are compared on, and a gradient over the outcomes back into one over the
vocabulary. Shapes: n tokens, V vocabulary, k cached tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Signal(Protocol):
    """The teacher's word on n tokens."""

    def outcomes(self, log_q: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """(log q, log p) over the outcomes, from the drafter's log q [n, V], differentiable in it.

        temperature: the teacher's.
        """
        ...

    def pull_back(self, gradient: Tensor, logits: Tensor, temperature: float) -> Tensor:
        """The gradient in logits / temperature [n, V] of a loss whose gradient in the outcomes'
        logits is `gradient`. logits and temperature: the drafter's."""
        ...

    def __getitem__(self, rows: slice) -> "Signal":
        """The word on some of the tokens."""
        ...


# From a slice of a batch's predicted tokens to the teacher's word on them, made when it is called.
Teacher = Callable[[slice], Signal]


@dataclass(frozen=True)
class Whole:
    """The teacher's logits over the whole (draft) vocabulary, [n, V]."""

    logits: Tensor

    def outcomes(self, log_q: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits = self.logits.to(log_q.dtype)
        return log_q, (logits if temperature == 1 else logits / temperature).log_softmax(-1)

    def pull_back(self, gradient: Tensor, logits: Tensor, temperature: float) -> Tensor:
        return gradient

    def __getitem__(self, rows: slice) -> "Whole":
        return Whole(self.logits[rows])


@dataclass(frozen=True)
class TopK:
    """The teacher's k likeliest tokens, with all others taken together as one outcome, the tail.

    ids int64 [n, k], log_p [n, k] and log_tail [n], float. A divergence over these k + 1 outcomes
    is at most the one over the vocabulary (taking outcomes together never separates two
    distributions more), and equal to it when q and p agree within the tail up to a factor.
    """

    ids: Tensor
    log_p: Tensor
    log_tail: Tensor

    def outcomes(self, log_q: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        assert temperature == 1, "a cache has the temperature that it was made at"
        # The sum over all others rather than 1 − Σ: where the tail is small that would be rounding.
        tail = log_q.exp().scatter(1, self.ids, 0.0).sum(-1)
        log_tail = tail.clamp(min=torch.finfo(tail.dtype).tiny).log()
        log_p = torch.cat([self.log_p, self.log_tail[:, None]], 1).to(log_q.dtype)
        return torch.cat([log_q.gather(1, self.ids), log_tail[:, None]], 1), log_p

    def pull_back(self, gradient: Tensor, logits: Tensor, temperature: float) -> Tensor:
        # Within the tail each token's share of the gradient is its share of q.
        others = (logits / temperature).scatter(1, self.ids, float("-inf")).softmax(-1)
        return others.mul_(gradient[:, -1:]).scatter_(1, self.ids, gradient[:, :-1])

    def __getitem__(self, rows: slice) -> "TopK":
        return TopK(self.ids[rows], self.log_p[rows], self.log_tail[rows])
