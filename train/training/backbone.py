"""The target under the heads of a `heads` stage: frozen, or trained together with them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from pydantic import Field
from torch import Tensor, nn

from decode.target.loading import Target
from decode.target.pretrained import is_sharded
from distill.losses import WeightedLoss
from distill.teacher.feature_sources import CachedFeatures, FeatureSource, LiveFeatures
from heads.head_training import HeadTraining, JointTraining
from train.data.batches import Inputs
from train.data.corpus import Corpus
from train.schema import Losses, StageConfig
from train.states.served_states import ServedStates
from train.training.live_window import LiveWindow, look_ahead_of
from train.training.optimizer import GroupConfig, OptimizerConfig
from train.training.trained_target import PREFIX, TrainedTarget, TrainedTargetConfig
from train.training.trainer import Clock
from train.training.training_task import LookAhead

# Of a frozen target's hidden states.
Source = LiveFeatures | LiveWindow | ServedStates | CachedFeatures


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


class Backbone(ABC):
    """The target under the heads in their training: its hidden states, and the module to train.

    weights_prefix: the prefix of the heads' weights in that module.
    """

    weights_prefix: str

    @abstractmethod
    def join(self, heads: HeadTraining, *, chunk: int) -> HeadTraining | JointTraining:
        """The module to train, on the heads' device. chunk: the number of tokens whose logits are
        in memory at a time."""

    @abstractmethod
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
        """Run the prepared module on a batch of the text, or of the dev slice (dev).

        ids: the ids of the batch's samples. losses: the loss weights by head. done: the share of
        the training's steps that are done, in [0, 1].
        """

    @property
    def look_ahead(self) -> LookAhead | None:
        """What the trainer calls before each batch (`TrainingTask.look_ahead`)."""
        return None

    @abstractmethod
    def target_with(self, weights: Mapping[str, Tensor]) -> Target:
        """The target that goes with these weights of the trained module."""

    def heads_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The heads' weights from the weights of the trained module."""
        prefix = self.weights_prefix
        return {k.removeprefix(prefix): x for k, x in weights.items() if k.startswith(prefix)}


class FrozenBackbone(Backbone):
    """The run's target, unchanged. features: makes the source of its hidden states at some
    layers."""

    weights_prefix = "heads."

    def __init__(
        self,
        target: Target,
        features: Callable[[Sequence[int]], Source],
    ) -> None:
        self.target, self._make_source = target, features
        self._dev_source: FeatureSource | None = None

    def join(self, heads: HeadTraining, *, chunk: int) -> HeadTraining:
        self._layers = heads.captured_layers
        self._source = self._make_source(self._layers)
        return heads

    @property
    def look_ahead(self) -> LookAhead | None:
        return look_ahead_of(self._source)

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
        source: FeatureSource = self._source
        if dev:
            # A separate source: samples of two splits may have the same id.
            if self._dev_source is None:
                model = self.target.model
                # All ranks must run a sharded target together, so none may skip it.
                remember = not is_sharded(model)
                self._dev_source = LiveFeatures(model, self._layers, remember=remember)
            source = self._dev_source
        features = source.features(batch["input_ids"], batch["attention_mask"], ids)
        return module(batch["input_ids"], batch["loss_mask"], features, losses)

    def target_with(self, weights: Mapping[str, Tensor]) -> Target:
        return self.target


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
        device = next(heads.parameters()).device
        model = self.trainable.model.to(device)
        return JointTraining(model, heads, self.config.weighted_loss, chunk=chunk)

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
