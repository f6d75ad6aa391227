"""The teacher signal: the target's distributions that losses compare the drafter with.

A signal for a few tokens has two forms: full logits, or top-k with a tail. The losses compare
teacher and drafter over a set of outcomes. A signal converts the drafter's log-probabilities over
its vocabulary to log-probabilities over these outcomes. It also converts a gradient over the
outcomes back to a gradient over the vocabulary.

The signal of a batch comes from the live target or its hidden states
(`distill.teacher.live_teacher`), or from stored top-k log-probabilities
(`distill.teacher.top_k_cache`).

Shapes: n predicted tokens, V vocabulary, k cached tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor


class Signal(Protocol):
    """The teacher signal for n tokens."""

    def outcomes(self, log_q: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return (log q, log p) over the outcomes.

        log_q: [n, V], the drafter's. The result is differentiable in it. temperature: the
        teacher's.
        """
        ...

    def pull_back(self, gradient: Tensor, logits: Tensor, temperature: float) -> Tensor:
        """Return the gradient of a loss in logits / temperature, [n, V].

        gradient: the gradient of the loss in the outcomes' logits. logits, temperature: the
        drafter's.
        """
        ...

    def __getitem__(self, rows: slice | Tensor) -> Self:
        """The signal for some of the tokens. rows: a slice, or int64 [m], their numbers."""
        ...


# Maps a slice of a batch's predicted tokens to its teacher signal, computed on each call.
Teacher = Callable[[slice], Signal]


@dataclass(frozen=True)
class TeacherLogits:
    """The teacher's logits over the full (draft) vocabulary, [n, V]."""

    logits: Tensor

    def outcomes(self, log_q: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits = self.logits.to(log_q.dtype)
        return log_q, (logits if temperature == 1 else logits / temperature).log_softmax(-1)

    def pull_back(self, gradient: Tensor, logits: Tensor, temperature: float) -> Tensor:
        return gradient

    def __getitem__(self, rows: slice | Tensor) -> "TeacherLogits":
        if isinstance(rows, slice):
            return TeacherLogits(self.logits[rows])
        # `logits[rows]` reads the index once for each number.
        return TeacherLogits(self.logits.index_select(0, rows))


@dataclass(frozen=True)
class TopK:
    """The teacher's k most likely tokens, and all other tokens merged into one outcome, the tail.

    ids int64 [n, k], log_p [n, k] and log_tail [n], float. A divergence over these k + 1 outcomes
    is at most the divergence over the vocabulary, because merging outcomes never increases it. Both
    are equal if q and p are proportional within the tail.
    """

    ids: Tensor
    log_p: Tensor
    log_tail: Tensor

    def outcomes(self, log_q: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        assert temperature == 1, "the teacher temperature of a cache is fixed"
        # Sum over all other tokens. For a small tail, 1 − Σ would be only rounding error.
        tail = log_q.exp().scatter(1, self.ids, 0.0).sum(-1)
        log_tail = tail.clamp(min=torch.finfo(tail.dtype).tiny).log()
        log_p = torch.cat([self.log_p, self.log_tail[:, None]], 1).to(log_q.dtype)
        return torch.cat([log_q.gather(1, self.ids), log_tail[:, None]], 1), log_p

    def pull_back(self, gradient: Tensor, logits: Tensor, temperature: float) -> Tensor:
        # Each token of the tail gets a share of the gradient equal to its share of q.
        tail_share = (logits / temperature).scatter(1, self.ids, float("-inf")).softmax(-1)
        return tail_share.mul_(gradient[:, -1:]).scatter_(1, self.ids, gradient[:, :-1])

    def __getitem__(self, rows: slice | Tensor) -> "TopK":
        return TopK(self.ids[rows], self.log_p[rows], self.log_tail[rows])
