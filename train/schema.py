"""The base classes of every part of a config."""

import difflib
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from decode.errors import UserError
from decode.sampling import Sampling


class Strict(BaseModel):
    """A part of the config. Unknown keys and wrong types are errors. Instances are immutable. A
    docstring under a field describes it."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True
    )


class SamplingConfig(Strict):
    """How text is drawn. The settings apply in the order of `generate()`: repetition penalty,
    temperature, top-k, top-p, min-p."""

    temperature: float = Field(0.0, ge=0)
    """Divides the logits. 0: greedy decoding."""
    top_k: int = Field(0, ge=0)
    """Draw from this many of the likeliest tokens. 0: from all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Draw from the likeliest tokens whose probabilities add up to this (1904.09751). 1: from
    all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Remove tokens with a probability below this share of the largest one (2407.01082). 0: keep
    all."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Makes tokens that stand in the text less likely (1909.05858). 1: off."""

    def build(self) -> Sampling:
        return Sampling(**dict(self))


class StageConfig(Strict):
    """The settings of every stage."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    """The name of the stage, by which later stages refer to it. No other stage has it."""
    kind: str
    """What the stage does, from the registry of stages."""


def closest_stage(name: str, stages: Sequence[StageConfig], *kinds: str) -> StageConfig:
    """The earlier stage with this name and one of these kinds. Otherwise raises UserError with
    the names of the stages of these kinds."""
    fitting = {stage.name: stage for stage in stages if stage.kind in kinds}
    if name not in fitting:
        close = difflib.get_close_matches(name, list(fitting), n=1)
        raise UserError(
            f"no earlier stage {name!r} of kind {' or '.join(kinds)}; there "
            f"{'is' if fitting else 'are'} {', '.join(fitting) or 'none'}."
            + (f' Did you mean "{close[0]}"?' if close else "")
        )
    return fitting[name]
