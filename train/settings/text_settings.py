"""The settings of stages that read a text."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from train.settings.schema import Losses, StageConfig

if TYPE_CHECKING:
    from distill.losses import WeightedLoss


def stages_of(text: str | list[str]) -> list[str]:
    """The generate stages whose answers are the text. Empty for the data's own responses."""
    return [] if text == "data" else [text] if isinstance(text, str) else text


class TextConfig(StageConfig):
    """The settings of a stage that reads a text."""

    text: str | list[str] = "data"
    """The name of a generate stage, or several, or `data` for the responses in the training
    data."""
    max_length: int = Field(1024, ge=2)
    """The maximum length of a sample in tokens, prompt included."""
    on_long: Literal["truncate", "drop"] = "truncate"
    """Cut longer samples from the right, or drop them."""

    @property
    def text_stages(self) -> list[str]:
        """The generate stages whose answers are the text. Empty for the data's own responses."""
        return stages_of(self.text)


class LossConfig(TextConfig):
    """The settings of a stage that learns from the target's distribution."""

    losses: Losses
    """The weighted sum that is minimised: {name: weight}, or {name: {weight: …, option: …}}; see
    `distill.losses`."""
    teacher_temperature: float = Field(1.0, gt=0)
    """Divides the target's logits before a loss compares the distributions (1503.02531)."""
    drafter_temperature: float = Field(1.0, gt=0)
    """Divides the drafter's logits before a loss compares the distributions."""
    tokens_per_pass: int | None = Field(None, ge=1)
    """The live target runs over the samples of the next batches together, in passes of this size on
    each rank: rows times the longest row's length. The states of at most four passes are in memory,
    or of one batch, if that is more. None: one pass for each batch of the training."""

    @property
    def weighted_loss(self) -> "WeightedLoss":
        from distill.losses import WeightedLoss  # imports torch

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


class CacheConfig(TextConfig):
    """The settings of a stage that stores the target's results for a text."""

    tokens_per_batch: int = Field(2048, ge=1)
    """The size of a batch on each rank: rows times the longest row's length."""
    part_samples: int = Field(256, ge=1)
    """The number of samples per written part. A killed stage loses at most one part."""
