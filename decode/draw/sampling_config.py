"""The settings of how text is drawn."""

from typing import TYPE_CHECKING

from pydantic import Field

from decode.base.strict import Strict

if TYPE_CHECKING:
    from decode.draw.sampling import Sampling


class SamplingConfig(Strict):
    """How text is drawn. The settings apply in the order of `generate()`: repetition penalty,
    temperature, top-k, top-p, min-p."""

    temperature: float = Field(0.0, ge=0)
    """Divides the logits. 0: greedy decoding."""
    top_k: int = Field(0, ge=-1)
    """Draw from this many of the likeliest tokens. 0 and −1: from all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Draw from the likeliest tokens whose probabilities add up to this (1904.09751). 1: from
    all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Remove tokens with a probability below this share of the largest one (2407.01082). 0: keep
    all."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Makes tokens that already occur in the text less likely (1909.05858). 1: off."""

    def build(self) -> "Sampling":
        from decode.draw.sampling import Sampling  # imports torch

        return Sampling(**dict(self))
