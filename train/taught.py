"""The loss settings of stages that learn from the target's distribution."""

from collections.abc import Mapping
from typing import Any

from distill.losses import WeightedLoss
from train.data.corpus import TextConfig


class TaughtConfig(TextConfig):
    """losses: {name: weight}, or {name: {weight: …, option: …}}; see `distill.losses`.
    teacher_temperature, drafter_temperature: of the two distributions that a loss compares."""

    losses: dict[str, Any]
    teacher_temperature: float = 1.0
    drafter_temperature: float = 1.0

    @property
    def weighted_loss(self) -> WeightedLoss:
        return WeightedLoss(
            self.losses,
            teacher_temperature=self.teacher_temperature,
            drafter_temperature=self.drafter_temperature,
        )

    @property
    def losses_in_words(self) -> str:
        """Such as '1·forward_kl + 0.5·jsd(beta=0.1)'."""
        parts = []
        for name, given in self.losses.items():
            options = dict(given) if isinstance(given, Mapping) else {"weight": given}
            weight = options.pop("weight", 1)
            shown = ", ".join(f"{k}={v:g}" for k, v in options.items())
            parts.append(f"{weight:g}·{name}" + (f"({shown})" if shown else ""))
        return " + ".join(parts)
