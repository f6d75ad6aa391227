"""The target under heads that is trained together with them."""

import math
from collections.abc import Mapping, Sequence

from pydantic import Field
from torch import Tensor, nn

from decode.model.loading import Target
from distill.losses import WeightedLoss
from heads.head_training import HeadTraining
from heads.joint_training import JointTraining
from train.base.schema import Losses, StageConfig
from train.data.batches import Inputs
from train.data.corpus import Corpus
from train.loop.backbone import Backbone
from train.loop.optimizer import GroupConfig, OptimizerConfig
from train.loop.trained_target import PREFIX, TrainedTarget, TrainedTargetConfig
from train.loop.trainer import Clock


class BackboneConfig(TrainedTargetConfig):
    """Trains the target together with its heads: Medusa-2 (2401.10774, section 2.2.2), and
    Blockwise's fine-tuned variant (1811.03115, section 6)."""

    losses: Losses = {"cross_entropy": 1.0}
    """The target's own losses, {name: weight}. cross_entropy compares it with the text. A loss
    that reads the teacher, such as forward_kl, is self-distillation from the original target."""
    heads_weight: float | None = Field(None, gt=0)
    """λ₀, the weight of the heads' loss. None: the value in the heads' paper."""
    lr_ratio: float = Field(0.25, gt=0)
    """The target's learning rate divided by `optimizer.lr`, the heads' learning rate."""
    ramp: float = Field(0.0, ge=0, le=1)
    """λ₀ rises from 0 over this share of the steps, or of `max_minutes` if more of that is over, as
    a quarter of a sine wave."""

    @property
    def weighted_loss(self) -> WeightedLoss:
        return WeightedLoss(self.losses)

    def check(self, stage: str, earlier: Sequence[StageConfig]) -> None:
        """Raise UserError for settings that do not fit together."""
        self.require_sound(stage, earlier, self.weighted_loss, PREFIX)

    def optimizer(self, config: OptimizerConfig) -> OptimizerConfig:
        """The config with a group for the target's learning rate. Its other groups come first."""
        group = GroupConfig(lr=config.lr * self.lr_ratio)
        return config.model_copy(update={"groups": config.groups | {f"{PREFIX}*": group}})


class TrainedBackbone(TrainedTarget, Backbone):
    """A trainable copy of the run's target under its heads."""

    weights_prefix = "heads.heads."

    def __init__(
        self, config: BackboneConfig, target: Target, corpus: Corpus, clock: Clock, *, stage: str
    ) -> None:
        """Arguments and errors are those of `TrainedTarget`."""
        self.config = config
        loss = config.weighted_loss
        super().__init__(config, loss, target, corpus, clock, stage=stage, key=PREFIX)

    def join(self, heads: HeadTraining, *, chunk: int) -> JointTraining:
        self._joint_weight = heads.heads.joint_weight
        return JointTraining(self.trainable.model, heads, self.config.weighted_loss, chunk=chunk)

    def weight(self, done: float) -> float:
        """λ₀, the weight of the heads' loss, after a share `done` of the steps."""
        weight = self.config.heads_weight or self._joint_weight
        assert weight is not None, "the stage refuses such heads"
        if done >= self.config.ramp:
            return weight
        return weight * math.sin(math.pi / 2 * done / self.config.ramp)

    def forward(
        self,
        module: nn.Module,
        batch: Inputs,
        ids: Sequence[str],
        losses: Mapping[int, float],
        done: float,
        *,
        dev: bool = False,
    ) -> tuple[Tensor, Tensor]:
        signal = self.signal(batch, ids, dev=dev)
        # The dev figures do not depend on the ramp.
        weight = 1.0 if dev else self.weight(done)
        return module(**batch, losses=losses, weight=weight, teacher=signal)
