"""What a training is given, its length, and how far it is."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field
from torch import Tensor, nn

from decode.base.errors import UserError
from decode.base.strict import Strict
from distill.flops import TextFlops
from train.base.schema import Seed
from train.data.batches import Inputs, RankText
from train.data.training_text import Text, Weights

# (module, batch, its samples' ids) → (loss summed over its tokens, each term's sum [terms])
Step = Callable[[nn.Module, Inputs, Sequence[str]], tuple[Tensor, Tensor]]
# (this rank's text of the round, the number of the batch that is used next)
LookAhead = Callable[[RankText, int], None]


class LoopConfig(Strict):
    """The length of the training and the size of its batches."""

    epochs: int = Field(3, ge=1)
    """The number of passes over the text."""
    max_steps: int | None = Field(None, ge=1)
    """The training stops after this many optimizer steps, even if `epochs` are not complete. None:
    no limit."""
    max_minutes: float | None = Field(None, gt=0)
    """The training stops after this many minutes. The learning rate follows the time if a greater
    share of the minutes than of the steps is over. Time for figures on dev text counts too. The
    number of steps then depends on the machine. None: no limit."""
    tokens_per_batch: int = Field(2048, ge=1)
    """The size of a batch, for all ranks together: rows times the longest row's length."""
    accumulation: int = Field(1, ge=1)
    """Batches per optimizer step."""
    save_every: int = Field(100, ge=1)
    """Optimizer steps between two checkpoints."""
    keep_checkpoints: int = Field(2, ge=1)
    """The number of checkpoints that are kept, the newest ones. With two, one is left if the newest
    is damaged."""
    keep_best: bool = False
    """The stage's drafter is the version with the best figure on the dev slice, not the last one.
    The figure is `expected_acceptance` of a small LM and `tokens_per_step` of heads. Needs `dev`.
    """
    patience: int | None = Field(None, ge=1)
    """The training ends after this many measurements in a row on the dev slice that are not better
    than the best one. Needs `keep_best`. None: it does not end early."""
    max_skipped_steps: int = Field(10, ge=0)
    """A step whose loss or gradient is not finite is not taken, and the training goes on with the
    next batch. It ends with an error at one more than this many of them."""
    log_every: int = Field(5, ge=1)
    """Optimizer steps between two logged figures."""
    seed: Seed = 0
    """The seed of the order of batches, of init weights, and of text that the drafter generates."""

    def require_dev(self, stage: str, *, measured: bool) -> None:
        """Raise UserError for settings that would do nothing. measured: whether there are figures
        on a dev slice."""
        if self.keep_best and not measured:
            raise UserError(
                f"stage {stage}: loop.keep_best compares figures on dev text, and the stage has "
                "none; leave keep_best out, or set dev if the stage has that setting"
            )
        if self.patience is not None and not self.keep_best:
            raise UserError(
                f"stage {stage}: loop.patience ends the training after its best version; set "
                "loop.keep_best too, or leave patience out"
            )


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
    `max_minutes` that is over, the same on all ranks. clock: the measured seconds by activity.
    skipped: the steps that were not taken, as their loss or gradient was not finite. last_skipped:
    {step, figures, samples} of the last of them: the names of these figures, and the samples' ids.
    """

    step: int = 0
    round: int = 0  # of the text: an epoch, or one round of generated samples
    batch: int = 0  # the next batch of the round
    seconds: float = 0.0
    time_share: float = 0.0
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
