"""What a training is given, its length, and how far it is."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from distill.flops import TextFlops
from train.data.batches import Inputs, RankText
from train.data.training_text import Text, Weights
from train.settings.training import LoopConfig

# (module, batch, its samples' ids) → (loss summed over its tokens, each term's sum [terms])
Step = Callable[[nn.Module, Inputs, Sequence[str]], tuple[Tensor, Tensor]]
# (this rank's text of the round, the number of the batch that is used next)
LookAhead = Callable[[RankText, int], None]


@dataclass
class TrainingTask:
    """The inputs of the trainer from a stage.

    label: the stage's name, a prefix of every logged figure. terms: the names of the loss terms.
    measure: computes figures of the module on a dev slice. All ranks call it together, every
    `measure_every` steps and at the end. figures: computes a step's logged figures from the sums of
    its terms and the number of predicted tokens. None: each term's mean over these tokens.
    look_ahead: called before each batch, so that a source can prepare the batches that follow.
    flops: the FLOPs of a step from shapes; None: not known.
    deciding: the figure of `measure` that says which version is best; higher is better.
    """

    label: str
    module: nn.Module
    step: Step
    terms: Sequence[str]
    text: Text
    pad_id: int
    measure: Callable[[nn.Module, Weights], dict[str, float]] | None = None
    measure_every: int = 1
    figures: Callable[[dict[str, float], int], dict[str, float]] | None = None
    look_ahead: LookAhead | None = None
    deciding: str = ""
    flops: TextFlops | None = None


@dataclass
class TrainingProgress:
    """The progress of a training; stored in every checkpoint.

    history: figures of logged steps. dev: figures of `TrainingTask.measure`. best: {step, figure,
    value} of the best version so far. seconds: total wall time. time_share: the share of
    `max_minutes` that is over, the same on all ranks. step_seconds, flops: of the steps alone, and
    summed over all ranks. clock: the measured seconds by activity.
    skipped: the steps that were not taken, as their loss or gradient was not finite. last_skipped:
    {step, figures, samples} of the last of them: the names of these figures, and the samples' ids.
    """

    step: int = 0
    round: int = 0  # of the text: an epoch, or one round of generated samples
    batch: int = 0  # the next batch of the round
    seconds: float = 0.0
    time_share: float = 0.0
    step_seconds: float = 0.0
    flops: float = 0.0
    tokens: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    dev: list[dict[str, float]] = field(default_factory=list)
    clock: dict[str, float] = field(default_factory=dict)
    best: dict[str, Any] | None = None
    skipped: int = 0
    last_skipped: dict[str, Any] | None = None

    @property
    def without_gain(self) -> int:
        """The number of measurements on the dev slice since the best version."""
        best = self.best
        return 0 if best is None else sum(row["step"] > best["step"] for row in self.dev)


def steps_in(loop: LoopConfig, batches_per_epoch: int) -> int:
    """The number of optimizer steps of a complete training on a fixed text."""
    steps = loop.epochs * math.ceil(batches_per_epoch / loop.accumulation)
    return min(steps, loop.max_steps or steps)
