"""The target under heads that is trained together with them."""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from decode.model.loading import Target
from heads.head_training import HeadTraining
from heads.joint_training import JointTraining
from train.data.batches import Inputs
from train.data.corpus import Corpus
from train.loop.heads_target import HeadsTarget
from train.loop.trained_target import TrainedTarget
from train.loop.trainer import TrainingClock
from train.settings.training import (
    PREFIX,
    BackboneConfig,
)


class TrainedHeadsTarget(TrainedTarget, HeadsTarget):
    """A trainable copy of the run's target under its heads."""

    weights_prefix = "heads.heads."

    def __init__(
        self,
        config: BackboneConfig,
        target: Target,
        corpus: Corpus,
        clock: TrainingClock,
        *,
        stage: str,
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
