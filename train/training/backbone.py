"""The target under the heads of a `heads` stage: frozen, or trained together with them."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from decode.artifact import write_directory
from decode.errors import UserError
from decode.target.loading import Target, load_target
from distill.drift import Drift, measure_drift
from distill.losses import WeightedLoss
from distill.teacher.feature_sources import CachedFeatures, FeatureSource, LiveFeatures
from distill.teacher.teacher_signal import LiveTeacher, split_model
from distill.trainable_model import LoraConfig, Trainable
from heads.head_training import HeadTraining, JointTraining
from train.data.batches import Batches, Inputs, collate, inputs
from train.data.chat import Sample
from train.data.corpus import Corpus
from train.data.read import spread
from train.schema import Losses, StageConfig, Strict, closest_stage
from train.training.live_window import LiveWindow, look_ahead_of
from train.training.optimizer import GroupConfig, OptimizerConfig
from train.training.trainer import Clock, LookAhead

PREFIX = "backbone."


class AdapterConfig(LoraConfig):
    """LoRA adapters on the target. The defaults are those of Medusa's experiments, which also
    adapted the output layer."""

    r: int = Field(32, ge=1)
    """The rank of an adapter."""
    alpha: float = Field(16.0, gt=0)
    """The scale of an adapter is alpha / r."""
    dropout: float = Field(0.05, ge=0, lt=1)
    """The dropout rate of an adapter's input."""


class BackboneConfig(Strict):
    """Trains the target together with its heads: Medusa-2 (2401.10774, section 2.2.2), and
    Blockwise's fine-tuned variant (1811.03115, section 6)."""

    lora: AdapterConfig | None = AdapterConfig()
    """Adapters on the target, merged at the end. None: all of its weights are trained."""
    losses: Losses = {"cross_entropy": 1.0}
    """The target's own losses, {name: weight}. cross_entropy compares it with the text. A loss
    that reads the teacher, such as forward_kl, is self-distillation from the original target."""
    heads_weight: float | None = Field(None, gt=0)
    """λ₀, the weight of the heads' loss. None: the value in the heads' paper."""
    lr_ratio: float = Field(0.25, gt=0)
    """The target's learning rate divided by `optimizer.lr`, the heads' learning rate."""
    ramp: float = Field(0.0, ge=0, le=1)
    """λ₀ rises from 0 over this share of the steps, as a quarter of a sine wave."""
    remember_teacher: bool = False
    """Keep the original target's hidden states in memory after their first use."""
    held_out: str = "data"
    """The text for measuring drift: `data` for the test split's own responses, or a generate stage
    that answered the dev split."""
    held_out_samples: int = Field(64, ge=1)
    """How many samples of `held_out` are used, spread evenly."""

    @property
    def weighted_loss(self) -> WeightedLoss:
        return WeightedLoss(self.losses)

    def check(self, stage: str, earlier: Sequence[StageConfig]) -> None:
        """Raise UserError for settings that do not fit together."""
        reads_teacher = self.weighted_loss.needs_teacher
        if self.remember_teacher and not reads_teacher:
            raise UserError(
                f"stage {stage}: no loss of the backbone reads the teacher, so "
                "backbone.remember_teacher would do nothing; leave it out"
            )
        if self.held_out == "data":
            return
        answers: Any = closest_stage(self.held_out, earlier, "generate")
        if answers.split == "train":
            raise UserError(
                f"stage {stage}: backbone.held_out {self.held_out} answered the train split, which "
                "is not held out; name a generate stage that answers the dev or the test split, or "
                "leave held_out out"
            )

    def optimizer(self, config: OptimizerConfig) -> OptimizerConfig:
        """The config with a group for the target's learning rate. Its other groups come first."""
        group = GroupConfig(lr=config.lr * self.lr_ratio)
        return config.model_copy(update={"groups": config.groups | {f"{PREFIX}*": group}})

    def trained_parameters(self, target: Target) -> int:
        """The number of the target's weights that are trained, adapter weights included."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(target.model.config)
            model = Trainable(model, lora=self.lora).model
        return sum(p.numel() for p in model.parameters() if p.requires_grad)


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
        features: Callable[[Sequence[int]], LiveFeatures | LiveWindow | CachedFeatures],
    ) -> None:
        self.target, self._make_source = target, features
        self._dev_source: FeatureSource | None = None

    def join(self, heads: HeadTraining, *, chunk: int) -> HeadTraining:
        self._layers = heads.captured_layers
        self._source = self._make_source(self._layers)
        return heads

    @property
    def look_ahead(self) -> LookAhead | None:
        source = self._source
        return look_ahead_of(source) if isinstance(source, LiveWindow | CachedFeatures) else None

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
                self._dev_source = LiveFeatures(self.target.model, self._layers, remember=True)
            source = self._dev_source
        features = source.features(batch["input_ids"], batch["attention_mask"], ids)
        return module(batch["input_ids"], batch["loss_mask"], features, losses)

    def target_with(self, weights: Mapping[str, Tensor]) -> Target:
        return self.target


class TrainedBackbone(Backbone):
    """A trainable float32 copy of the run's target. The target itself does not change.

    Raises UserError if the adapters match no layer or match the output layer, or if no held-out
    text has response tokens.
    """

    weights_prefix = "heads.heads."

    def __init__(
        self, config: BackboneConfig, target: Target, corpus: Corpus, clock: Clock, *, stage: str
    ) -> None:
        """stage: the stage's name, for messages. Draws from torch's random state."""
        self.config, self.target = config, target
        self.held_out = self._held_out(corpus, stage)
        original = target.model
        model = copy.deepcopy(original).to("cpu", torch.float32).train().requires_grad_(True)
        self.trainable = Trainable(model, lora=config.lora)
        if not isinstance(model.get_output_embeddings(), nn.Linear):
            raise UserError(
                f"stage {stage}: backbone.lora.targets gives the output layer an adapter, but "
                "heads and losses read that layer directly; leave it out of the targets"
            )
        self.teacher = self.dev_teacher = None
        if config.weighted_loss.needs_teacher:
            split = split_model(original)
            self.teacher = LiveTeacher(
                split, remember=config.remember_teacher, timed=partial(clock, "teacher")
            )
            # A separate teacher: samples of two splits may have the same id.
            self.dev_teacher = LiveTeacher(split, remember=True)

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
        teacher = self.dev_teacher if dev else self.teacher
        signal = None if teacher is None else teacher.signal(**batch, ids=ids)
        # The dev figures do not depend on the ramp.
        weight = 1.0 if dev else self.weight(done)
        return module(**batch, losses=losses, weight=weight, teacher=signal)

    def target_with(self, weights: Mapping[str, Tensor]) -> Target:
        """The target with these weights (named as in `JointTraining`) and its adapters merged, in
        the original's dtype and on its device."""
        original = self.target
        trained = {k.removeprefix(PREFIX): x for k, x in weights.items() if k.startswith(PREFIX)}
        model, _ = self.trainable.plain(trained)
        model.to(original.device, original.dtype)
        return replace(original, model=model, revision=None)

    def save(self, weights: Mapping[str, Tensor], path: Path) -> tuple[Target, Drift]:
        """Write the new target as a model directory, completely or not at all.

        Returns the target as loaded from that directory, and its drift from the original.
        """
        original = self.target
        trained = self.target_with(weights)

        def fill(directory: Path) -> None:
            trained.model.save_pretrained(directory)
            original.tokenizer.save_pretrained(directory)

        write_directory(path, fill)
        new = load_like(original, path)
        drift = measure_drift(split_model(original.model), split_model(new.model), self._batches())
        return new, drift

    def _held_out(self, corpus: Corpus, stage: str) -> list[Sample]:
        text = self.config.held_out
        samples = [s for s in corpus.samples(text, "test") if any(s.mask[1:])]
        if not samples:
            raise UserError(
                f"stage {stage}: backbone.held_out {text} has no response tokens to measure the "
                "drift on; add a generate stage that answers the dev split, and name it there"
            )
        return spread(samples, self.config.held_out_samples)

    def _batches(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        target = self.target
        lengths = [len(sample.tokens) for sample in self.held_out]
        batches = Batches(lengths, tokens_per_batch=2048, seed=0, epoch=0)
        tensors = []
        for number in range(len(batches)):
            rows = [self.held_out[i] for i in batches.batch(number)]
            batch = inputs(collate(rows, target.tokenizer.pad_token_id or 0), target.device)
            tensors.append((batch["input_ids"], batch["attention_mask"], batch["loss_mask"]))
        return tensors


def load_like(original: Target, path: Path) -> Target:
    """Load the target in a directory, in the dtype and on the device of `original`."""
    dtype = str(original.dtype).removeprefix("torch.")
    return load_target(str(path), dtype=dtype, device=str(original.device))
