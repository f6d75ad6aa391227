"""The result of a decode."""

from dataclasses import dataclass, field
from typing import Any

from decode.stats import Counts, Tally, Timing
from decode.verification import Verification


@dataclass
class Decoded:
    """The result of a decode. outputs[i] answers prompts[i], with the EOS if it was emitted. Row i
    of the tally and of the steps is prompt i too."""

    outputs: list[list[int]]
    tally: Tally
    timing: Timing
    steps: list[Verification] = field(default_factory=list)

    @property
    def counts(self) -> Counts:
        return self.tally.pooled()

    def to_dict(self) -> dict[str, Any]:
        """Everything except the prompts, as JSON values: token ids, pooled counts and figures (also
        by position), milliseconds by part, and every step."""
        return {
            "outputs": self.outputs,
            **self.counts.to_dict(),
            "timing": self.timing.to_dict(),
            "per_step": [step.to_dict() for step in self.steps],
        }
