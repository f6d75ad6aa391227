"""The target under the heads of a `heads` stage: what both kinds share, and the frozen one, which
gives its hidden states. `train.loop.trained_heads_target` trains the target too."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from decode.model.loading import Target
from distill.teacher.cached_features import CachedFeatures
from distill.teacher.dev_features import dev_features
from distill.teacher.feature_sources import FeatureSource, LiveFeatures
from heads.head_training import HeadTraining
from heads.heads_module import Heads
from heads.joint_training import JointTraining
from train.data.batches import Inputs
from train.engines.states.served_states import ServedStates
from train.loop.live_window import LiveWindow, look_ahead_of
from train.loop.trainer import Trainer
from train.loop.training_task import LookAhead, Step

# Of a frozen target's hidden states.
StateSource = LiveFeatures | LiveWindow | ServedStates | CachedFeatures


class HeadsTarget(ABC):
    """The target under the heads in their training: its hidden states, and the module to train.

    weights_prefix: the prefix of the heads' weights in that module. trainer: runs the
    training; set before the first step.
    """

    weights_prefix: str
    trainer: Trainer

    @abstractmethod
    def join(self, heads: HeadTraining, *, chunk: int) -> HeadTraining | JointTraining:
        """The module to train. chunk: the number of tokens whose logits are in memory at a
        time."""

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

    def step_of(self, heads: Heads) -> Step:
        """What the trainer runs in each step."""

        def step(module: nn.Module, batch: Inputs, ids: Sequence[str]) -> tuple[Tensor, Tensor]:
            # Draws from torch's random state, which checkpoints store. It is the same on all ranks
            # (except after draws for an adapter's dropout).
            losses = heads.loss_weights(float(torch.rand(())))
            # Never 0: self-distillation begins with a loss of 0, so the gradient would be only
            # rounding errors, and Adam takes full steps even for tiny gradients.
            done = self.trainer.done_share(self.trainer.progress.step + 1)
            return self.forward(module, batch, ids, losses, done)

        return step

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


class FrozenHeadsTarget(HeadsTarget):
    """The run's target, unchanged. features: makes the source of its hidden states at some
    layers."""

    weights_prefix = "heads."

    def __init__(self, target: Target, features: Callable[[Sequence[int]], StateSource]) -> None:
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
            if self._dev_source is None:
                self._dev_source = dev_features(self.target.model, self._layers)
            source = self._dev_source
        features = source.features(batch["input_ids"], batch["attention_mask"], ids)
        return module(batch["input_ids"], batch["loss_mask"], features, losses)

    def target_with(self, weights: Mapping[str, Tensor]) -> Target:
        return self.target
