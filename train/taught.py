"""The loss settings of stages that learn from the target's distribution."""

from collections.abc import Mapping

from pydantic import Field

from distill.losses import WeightedLoss
from train.data.samples import TextConfig
from train.schema import Losses


class TaughtConfig(TextConfig):
    """The settings of a stage that learns from the target's distribution."""

    losses: Losses
    """The weighted sum that is minimised: {name: weight}, or {name: {weight: …, option: …}}; see
    `distill.losses`."""
    teacher_temperature: float = Field(1.0, gt=0)
    """Divides the target's logits before a loss compares the distributions (1503.02531)."""
    drafter_temperature: float = Field(1.0, gt=0)
    """Divides the drafter's logits before a loss compares the distributions."""

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
