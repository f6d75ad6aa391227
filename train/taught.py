"""What stages that learn from the target's distribution are told of their losses."""

from typing import Any

from distill.losses import Terms
from train.samples import TextConfig


class TaughtConfig(TextConfig):
    """losses: {name: weight}, or {name: {weight: …, option: …}}; see `distill.losses`. The
    temperatures are those of the two distributions that a loss compares."""

    losses: dict[str, Any]
    teacher_temperature: float = 1.0
    drafter_temperature: float = 1.0

    @property
    def terms(self) -> Terms:
        return Terms(
            self.losses,
            teacher_temperature=self.teacher_temperature,
            drafter_temperature=self.drafter_temperature,
        )
