"""The settings of a small language model that is trained. Nothing here imports torch."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from decode.base.errors import UserError
from decode.base.strict import Strict


class LoraConfig(Strict):
    """Low-rank adapters (LoRA, 2106.09685), built with peft."""

    r: int = Field(16, ge=1)
    """The rank of an adapter."""
    alpha: float = Field(32.0, gt=0)
    """The scale of an adapter is alpha / r."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """The dropout rate of an adapter's input."""
    targets: str | list[str] = "all-linear"
    """The linear layers that get an adapter: the ends of their names, an expression for their whole
    names, or `all-linear` for all except the output layer."""

    def layers(self, sizes: Mapping[str, Any]) -> list[str]:
        """Those of the linear layers with these names that get an adapter."""
        if self.targets == "all-linear":
            return list(sizes)
        if isinstance(self.targets, str):
            return [x for x in sizes if re.fullmatch(self.targets, x)]
        return [x for x in sizes if any(f".{x}".endswith(f".{end}") for end in self.targets)]

    def parameters(self, sizes: Mapping[str, tuple[int, int]]) -> int:
        """The number of weights of the adapters on a model with these linear layers."""
        return sum(self.r * sum(sizes[name]) for name in self.layers(sizes))


class DrafterLora(LoraConfig):
    """Low-rank adapters of a drafter."""

    merge: bool = True
    """Write the drafter with its adapters merged in. false: write the adapters alone, as a small
    directory that names its base (`decode.opening.adapters`)."""


class ParallelConfig(Strict):
    """A drafter that drafts all tokens in one pass (PARD, 2504.18583)."""

    tokens: int = Field(8, ge=2)
    """K, the number of tokens that one pass predicts in training. A draft may be deeper."""
    keep: float = Field(0.7, gt=0, le=1)
    """r; copy i of a text keeps rⁱ of its predictions."""
    keep_min: float = Field(0.2, ge=0, le=1)
    """r_min; each copy keeps at least this share."""
    mask_token: int | str | None = None
    """The mask token: an id that no text contains, or the text of an unused special token. None:
    that of the stage that this stage continues, or the first row of the embeddings that is no
    token."""
    place_smoothing: float | None = Field(None, ge=0, le=1)
    """a of D-PACE (2605.18810; the paper's is 0.5): each place of a draft is weighted by how likely
    the drafter now gets all places before it right. null: the same weight for all places."""
    confidence: bool = False
    """The weights of PARD-2 (2605.08632), as its authors' code computes them: a prediction is
    weighted by the target's probability of the tokens that are masked before it. The losses must
    compare with the target."""

    @model_validator(mode="after")
    def _one_weight(self) -> Self:
        if self.confidence and self.place_smoothing is not None:
            raise ValueError(
                "place_smoothing and confidence both set the weights of the places; choose one"
            )
        return self

    @property
    def tokens_per_text_token(self) -> float:
        """The tokens that all copies have, at most, for each token of a text."""
        return sum(kept_share(copy, self.keep, self.keep_min) for copy in range(self.tokens))


def kept_share(copy: int, keep: float, keep_min: float) -> float:
    """The share of its predictions that copy i keeps: max(rⁱ, r_min)."""
    return max(keep**copy, keep_min)


class StudentConfig(Strict):
    """Where the drafter starts: exactly one of these settings."""

    layers: list[int] | None = None
    """A subset of the target's layers, by number from 0."""
    model: str | None = None
    """An existing smaller model: a hub id, directory or GGUF file. Its tokenizer is the target's,
    unless `vocabulary` says otherwise. Its output layer may be padded to another size."""
    config: dict[str, Any] | None = None
    """Changes to the target's config, for a model with random weights."""
    stage: str | None = None
    """The stage whose drafter is trained further: an earlier distill or online stage."""
    vocabulary: Literal["shared"] | None = None
    """`shared`: the model, or the drafter of the stage, has another tokenizer than the target, and
    learns to draft the tokens that both have. null: it has the target's tokenizer."""

    @model_validator(mode="after")
    def _one(self) -> "StudentConfig":
        given = [name for name, value in self if value is not None and name != "vocabulary"]
        if len(given) != 1:
            raise ValueError(
                f"found {', '.join(given) or 'nothing'}; expected exactly one of layers, model, "
                "config, stage"
            )
        if self.vocabulary is not None and given[0] not in ("model", "stage"):
            raise ValueError(
                f"vocabulary is {self.vocabulary}, but the drafter starts from {given[0]}, which "
                "has the target's tokenizer; leave vocabulary out"
            )
        return self

    def spec(self, earlier: Mapping[str, Path]) -> str:
        """The name of the existing model or drafter, as `load_target` reads it. earlier: the
        directories of earlier stages by name."""
        return self.model or str(earlier[self.stage or ""] / "drafter")


_OTHER_TOKENIZER = "the drafter has another tokenizer than the target"
# What cannot be set beside `vocabulary: shared`, and why.
REFUSED_BY_SHARED = {
    "on_policy": f"{_OTHER_TOKENIZER}, and learns from the target's tokens only",
    "parallel": f"{_OTHER_TOKENIZER}, and its drafts in one pass are not trained",
    "draft_vocabulary": f"{_OTHER_TOKENIZER}, and the tokens of both are its draft vocabulary",
}


def refuse(settings: Any, **reasons: str) -> None:
    """Raise UserError if any of these settings of a stage is set. reasons: {setting: reason}; a
    setting of a part is `part.setting`."""
    for key, reason in reasons.items():
        part, *names = settings, *key.split(".")
        for name in names[:-1]:
            part = getattr(part, name)
        if getattr(part, names[-1]) != type(part).model_fields[names[-1]].default:
            raise UserError(
                f"stage {settings.name}: {key} cannot be set here: {reason}; leave it out"
            )
