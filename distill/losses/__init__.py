"""Losses between drafter and target, registered by name. Each is defined per token.

The `value` of a loss is its definition, and in float64 the oracle. Its `fused` computes value and
gradient together in closed form, without autograd's copies of [n, V].
`distill.chunked_loss.chunked_loss` calls `fused` on a few tokens at a time.

p is the target's distribution for a token, q is the drafter's. The acceptance rate of speculative
sampling is α = Σ min(p, q) = 1 − TV(p, q) (Leviathan et al., 2211.17192, eq. 3). So every loss here
is a way to lower TV.

Shapes: n tokens, V outcomes (the vocabulary; or, against a cache, its top k and one tail).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from decode.base.errors import UserError, nearest
from decode.base.registry import Registry, import_all
from distill.teacher.teacher_signal import Signal


class LossRows:
    """Log-probabilities of n tokens over the outcomes, [n, V], and values derived from them."""

    def __init__(self, log_q: Tensor, log_p: Tensor | None, labels: Tensor) -> None:
        self.log_q, self._log_p, self.labels = log_q, log_p, labels

    @property
    def log_p(self) -> Tensor:
        assert self._log_p is not None, "this loss needs the teacher's distribution"
        return self._log_p

    @cached_property
    def q(self) -> Tensor:
        return self.log_q.exp()

    @cached_property
    def p(self) -> Tensor:
        return self.log_p.exp()


class Loss(ABC):
    """One loss. It is a frozen dataclass of its options.

    needs_teacher: whether the loss reads p. If not, the loss needs no teacher forward. It then
    depends only on the text and sees the drafter at temperature 1 over its full vocabulary.
    """

    needs_teacher: ClassVar[bool] = True

    @abstractmethod
    def value(self, rows: LossRows) -> Tensor:
        """The loss of each token, [n], differentiable. This is the definition of the loss."""

    def fused(self, rows: LossRows) -> tuple[Tensor, Tensor]:
        """Return the value [n] and its gradient with respect to the drafter's logits [n, V]."""
        log_q = rows.log_q.detach().requires_grad_()
        with torch.enable_grad():
            values = self.value(LossRows(log_q, rows._log_p, rows.labels))
            (slope,) = torch.autograd.grad(values.sum(), log_q)
        return values.detach(), slope - rows.q * slope.sum(-1, keepdim=True)


# The label that torch's losses ignore.
IGNORED = -100

LOSSES: Registry[type[Loss]] = Registry("loss")


@dataclass(frozen=True)
class Term:
    """A loss and its weight in a sum."""

    weight: float
    loss: Loss


class WeightedLoss:
    """A weighted sum of losses: {name: weight} or {name: {"weight": w, option: value}}.

    teacher_temperature and drafter_temperature divide the logits from which p and q are computed.
    Raises UserError for an unknown name or option, and for a number out of range.
    """

    def __init__(
        self,
        losses: Mapping[str, float | Mapping[str, Any]],
        *,
        teacher_temperature: float = 1.0,
        drafter_temperature: float = 1.0,
    ) -> None:
        if not losses:
            raise UserError(f"no loss is given; expected at least one of {', '.join(LOSSES)}")
        self.terms = {name: _term(name, setting) for name, setting in losses.items()}
        for model, value in (("teacher", teacher_temperature), ("drafter", drafter_temperature)):
            if not value > 0:
                raise UserError(f"{model}_temperature is {value}; expected a number > 0")
        self.teacher_temperature = teacher_temperature
        self.drafter_temperature = drafter_temperature

    @property
    def names(self) -> list[str]:
        return list(self.terms)

    @property
    def needs_teacher(self) -> bool:
        return any(term.loss.needs_teacher for term in self.terms.values())

    def weigh(self, values: Tensor) -> Tensor:
        """Σ weight · value over the first dimension, [terms, …] → […]."""
        # Factors of the host: a tensor of them would be a copy that waits for the device.
        weighted = zip(self.terms.values(), values.unbind(), strict=True)
        return torch.stack([term.weight * value for term, value in weighted]).sum(0)

    def values(self, logits: Tensor, signal: Signal | None, labels: Tensor) -> Tensor:
        """Each term for each token, [terms, n], unweighted and differentiable: the oracle.

        logits: [n, V], the drafter's. labels: int64 [n], −100 for a token that text terms ignore.
        """
        on_text, on_teacher = self._rows(logits, signal, labels)
        values = [
            term.loss.value(on_teacher if term.loss.needs_teacher else on_text)
            for term in self.terms.values()
        ]
        return torch.stack(values)

    def fused(self, logits: Tensor, signal: Signal | None, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return each term for each token, [terms, n], and the gradient of the weighted sum.

        The gradient is with respect to the logits, [n, V].
        """
        on_text, on_teacher = self._rows(logits, signal, labels)
        values = []
        gradients: dict[bool, Tensor] = {}  # by whether the terms read the teacher
        for term in self.terms.values():
            reads_teacher = term.loss.needs_teacher
            value, gradient = term.loss.fused(on_teacher if reads_teacher else on_text)
            values.append(value)
            if term.weight != 1:
                gradient = gradient * term.weight
            if reads_teacher in gradients:
                gradient = gradients[reads_teacher] + gradient
            gradients[reads_teacher] = gradient
        total = gradients.get(False)
        if True in gradients:
            assert signal is not None
            of_teacher = signal.pull_back(gradients[True], logits, self.drafter_temperature)
            if self.drafter_temperature != 1:
                of_teacher = of_teacher / self.drafter_temperature
            total = of_teacher if total is None else total + of_teacher
        assert total is not None
        return torch.stack(values), total

    def _rows(
        self, logits: Tensor, signal: Signal | None, labels: Tensor
    ) -> tuple[LossRows, LossRows]:
        """Return the rows for the terms on the text and the rows for the terms on the teacher."""
        text_log_q = log_q = logits.log_softmax(-1)
        if self.drafter_temperature != 1:
            log_q = (logits / self.drafter_temperature).log_softmax(-1)
        on_text = LossRows(text_log_q, None, labels)
        if signal is None:
            return on_text, on_text
        return on_text, LossRows(*signal.outcomes(log_q, self.teacher_temperature), labels)


def _term(name: str, setting: float | Mapping[str, Any]) -> Term:
    kind = LOSSES[name]
    options = dict(setting) if isinstance(setting, Mapping) else {"weight": setting}
    weight = options.pop("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
        raise UserError(f"loss {name} has weight {weight!r}; expected a number > 0")
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for option in options:
        if option not in known:
            raise UserError(
                f"loss {name} has no option {option!r}; it has weight"
                f"{''.join(', ' + k for k in known)}.{nearest(option, ['weight', *known])}"
            )
    return Term(float(weight), kind(**options))


import_all(__name__)
