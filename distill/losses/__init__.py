"""Losses between drafter and target by name, each stated for one token at a time.

A loss is one file with one registration. What it computes here, eagerly and over whole
vocabulary rows, is both the definition and the oracle of the chunked form in `distill.chunked`,
which calls the same function on one chunk of tokens after another.

Shapes: n tokens, V vocabulary. Logits come in float32 (float64 in the tests).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.errors import UserError
from decode.registry import Registry


@dataclass(frozen=True)
class Loss:
    """per_token(student_logits [n, V], teacher_logits [n, V] or None, labels int64 [n]) → [n].

    needs_teacher: whether teacher_logits is read; a loss without it costs no teacher forward.
    """

    per_token: Callable[[Tensor, Tensor | None, Tensor], Tensor]
    needs_teacher: bool


LOSSES: Registry[Loss] = Registry("loss")


@dataclass(frozen=True)
class Terms:
    """A weighted sum of losses, {name: weight}; UserError for an unknown name or a weight ≤ 0."""

    weights: dict[str, float]

    def __post_init__(self) -> None:
        if not self.weights:
            raise UserError(f"no loss is given; expected at least one of {', '.join(LOSSES)}")
        for name, weight in self.weights.items():
            LOSSES[name]
            if not weight > 0:
                raise UserError(f"loss {name} has weight {weight}; expected a number > 0")

    @property
    def needs_teacher(self) -> bool:
        return any(LOSSES[name].needs_teacher for name in self.weights)

    def weigh(self, values: dict[str, Tensor]) -> Tensor:
        """Σ weight · value over the terms."""
        return torch.stack([self.weights[name] * value for name, value in values.items()]).sum()

    def per_token(
        self, student: Tensor, teacher: Tensor | None, labels: Tensor
    ) -> dict[str, Tensor]:
        """Each term, unweighted, [n]."""
        return {name: LOSSES[name].per_token(student, teacher, labels) for name in self.weights}


from distill.losses import cross_entropy, forward_kl  # noqa: E402, F401  (each registers itself)
