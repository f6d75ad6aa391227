"""A trainable copy of the run's target, the new target that it becomes, and the new one's drift."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from decode.base.artifact import write_directory
from decode.base.device import dtype_name
from decode.base.errors import UserError
from decode.model.loading import Target, load_target
from distill.drift import Drift, measure_drift
from distill.losses import WeightedLoss
from distill.teacher.live_teacher import LiveTeacher
from distill.teacher.teacher_signal import Teacher
from distill.trainable_model import Trainable
from train.data.batches import Inputs, batches_for
from train.data.chat_tokens import Sample
from train.data.corpus import Corpus
from train.data.read import spread
from train.loop.teachers import dev_teacher
from train.loop.trainer import TrainingClock
from train.settings.training import PREFIX, TrainedTargetConfig


def trained_parameters(config: TrainedTargetConfig, target: Target) -> int:
    """The number of the target's weights that are trained, adapter weights included."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(target.model.config)
        model = Trainable(model, lora=config.lora).model
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


class TrainedTarget:
    """A trainable float32 copy of the run's target. The target itself does not change.

    The module that is trained holds the copy as its attribute `backbone`. Raises UserError if the
    adapters do not fit (`Trainable`), or if no held-out text has response tokens.
    """

    def __init__(
        self,
        config: TrainedTargetConfig,
        loss: WeightedLoss,
        target: Target,
        corpus: Corpus,
        clock: TrainingClock,
        *,
        stage: str,
        key: str,
    ) -> None:
        """stage: the stage's name, and key: where `config` is in it, for messages. Draws from
        torch's random state."""
        self.target = target
        self.held_out = held_out_samples(config, corpus, stage, key)
        original = target.model
        model = copy.deepcopy(original).to("cpu", torch.float32).train().requires_grad_(True)
        try:
            self.trainable = Trainable(model, lora=config.lora)
        except UserError as error:
            raise UserError(f"stage {stage}: {key}{error}") from error
        self.teacher = self.dev_teacher = None
        if loss.needs_teacher:
            self.teacher = LiveTeacher(original, timed=partial(clock, "teacher"))
            self.dev_teacher = dev_teacher(original)

    def signal(self, batch: Inputs, ids: Sequence[str], *, dev: bool = False) -> Teacher | None:
        """The original target's signal for a batch of the text, or of the dev slice (dev). None if
        no loss reads it. ids: the ids of the batch's samples."""
        teacher = self.dev_teacher if dev else self.teacher
        return None if teacher is None else teacher.signal(**batch, ids=ids)

    def target_with(self, weights: Mapping[str, Tensor]) -> Target:
        """The target with these weights (named as in the trained module), its adapters merged, in
        the original's dtype and on its device."""
        original = self.target
        trained = {k.removeprefix(PREFIX): x for k, x in weights.items() if k.startswith(PREFIX)}
        model, _ = self.trainable.merged_model(trained)
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
        batches = [
            (tensors["input_ids"], tensors["attention_mask"], tensors["loss_mask"])
            for _, _, tensors in batches_for(original, self.held_out, 2048)
        ]
        return new, measure_drift(original.model, new.model, batches)


def held_out_samples(
    config: TrainedTargetConfig, corpus: Corpus, stage: str, key: str
) -> list[Sample]:
    """The samples of `held_out` that the drift is measured on. Raises UserError if none has
    response tokens."""
    samples = [s for s in corpus.samples(config.held_out, "test") if any(s.mask[1:])]
    if not samples:
        raise UserError(
            f"stage {stage}: {key}held_out {config.held_out} has no response tokens to measure the "
            "drift on; add a generate stage that answers the dev split, and name it there"
        )
    return spread(samples, config.held_out_samples)


def load_like(original: Target, path: Path) -> Target:
    """Load the target in a directory, in the dtype and on the device of `original`."""
    dtype = dtype_name(original.dtype)
    return load_target(str(path), dtype=dtype, device=str(original.device))
