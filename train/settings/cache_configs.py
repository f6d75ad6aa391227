"""The settings of `teacher_cache` and `feature_cache` stages."""

from typing import Literal

from pydantic import Field

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


class FeatureCacheConfig(CacheConfig):
    """The target's hidden states of a text, for any number of trainings."""

    kind: Literal["feature_cache"] = "feature_cache"
    captured_layers: list[int] = Field([-1], min_length=1)
    """The layers whose hidden states are captured, by number; −1 for the hidden states that the
    output layer reads."""
