"""The settings of `teacher_cache` and `feature_cache` stages."""

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from decode.base.errors import UserError
from train.settings.schema import Check, StageConfig
from train.settings.text_settings import CacheConfig


class TeacherCacheConfig(CacheConfig):
    """The target's top-k log-probabilities of a text, for any number of trainings."""

    kind: Literal["teacher_cache"] = "teacher_cache"
    k: int = Field(64, ge=1)
    """The number of tokens kept of each distribution."""
    temperature: float = Field(1.0, gt=0)
    """The temperature of the target."""
    draft_vocabulary: int | None = Field(None, ge=1)
    """Keep the distribution over this many of the text's most frequent tokens, renormalised. None:
    over all tokens."""
    shared_with: str | None = None
    """The model of a distill stage with `vocabulary: shared`: a hub id, directory or GGUF file.
    Keep the distribution over the tokens that the target shares with it, renormalised. null: over
    all tokens."""
    chunk_tokens: int = Field(256, ge=1)
    """The number of tokens whose logits are in memory at a time."""

    def checks(self, earlier: Sequence[StageConfig]) -> Iterator[Check]:
        yield from super().checks(earlier)
        yield self._check_vocabulary

    def _check_vocabulary(self) -> None:
        if self.draft_vocabulary is not None and self.k > self.draft_vocabulary:
            raise UserError(
                f"stage {self.name}: k is {self.k}, but draft_vocabulary is only "
                f"{self.draft_vocabulary}; lower k, or raise draft_vocabulary"
            )
        if self.shared_with is not None and self.draft_vocabulary is not None:
            raise UserError(
                f"stage {self.name} sets shared_with and draft_vocabulary, but the shared tokens "
                "are the draft vocabulary; leave draft_vocabulary out"
            )


class FeatureCacheConfig(CacheConfig):
    """The target's hidden states of a text, for any number of trainings."""

    kind: Literal["feature_cache"] = "feature_cache"
    captured_layers: list[int] = Field([-1], min_length=1)
    """The layers whose hidden states are captured, by number; −1 for the hidden states that the
    output layer reads."""

    takes_device_map: ClassVar[bool] = True

    def checks(self, earlier: Sequence[StageConfig]) -> Iterator[Check]:
        yield from super().checks(earlier)
        yield self._check_layers

    def _check_layers(self) -> None:
        if len(set(self.captured_layers)) < len(self.captured_layers):
            raise UserError(
                f"stage {self.name}: captured_layers is {self.captured_layers}, with a layer "
                "twice; list each layer once"
            )
