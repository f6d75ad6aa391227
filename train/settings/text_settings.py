"""The settings of stages that read a text."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from decode.base.errors import UserError
from train.settings.schema import Check, Losses, StageConfig, closest_stage, need_teacher

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

    def checks(self, earlier: Sequence[StageConfig]) -> Iterator[Check]:
        for name in self.text_stages:
            yield partial(self._require_answers, name, earlier)

    def _require_answers(self, name: str, earlier: Sequence[StageConfig]) -> None:
        answers: Any = closest_stage(name, earlier, "generate")
        if answers.split == "test":
            raise UserError(
                f"stage {self.name} would train on the answers of {name} to the test split, but "
                "that split is for evaluation; name a stage that answers train or dev prompts"
            )


def complete_target_part(config: Any, used: Mapping[str, bool]) -> str | None:
    """The first setting of a training that needs the complete target in one process, by its name.
    used: the options of the kind of stage, and whether they are used. None: there is none."""
    shared = {
        # Ranks make different numbers of such passes, and shards need the same number.
        "tokens_per_pass": config.tokens_per_pass is not None,
        "dev.decode_prompts": config.dev is not None and config.dev.decode_prompts > 0,
    }
    return next((name for name, is_used in {**used, **shared}.items() if is_used), None)


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

    def checks(self, earlier: Sequence[StageConfig]) -> Iterator[Check]:
        yield from super().checks(earlier)
        yield self._require_use_of_temperature

    def _require_use_of_temperature(self) -> None:
        if self.teacher_temperature != 1 and not self.needs_teacher:
            raise UserError(
                f"stage {self.name}: no loss reads the teacher, so teacher_temperature would do "
                "nothing; leave it out"
            )

    @property
    def needs_teacher(self) -> bool:
        """Whether a loss reads the target's distribution."""
        return need_teacher(self.losses)

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
