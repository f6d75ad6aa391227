"""A step of a distillation, its teachers, and what a draft vocabulary loses of the teacher."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.model.hidden_states import FINAL
from decode.model.loading import Target
from distill.teacher.decoder_states import padded_sources
from distill.teacher.dev_features import dev_features
from distill.teacher.live_teacher import LiveTeacher, TeacherSource
from train.data.batches import Inputs, collate, inputs
from train.data.chat_tokens import Sample
from train.data.read import spread
from train.loop.trainer import TrainingClock
from train.loop.training_task import Step

Sources = Mapping[str, Sequence[int]]  # what an encoder reads, by the id of the sample

# Number of samples for measuring the probability mass that a draft vocabulary loses.
LOST_MASS_SAMPLES = 16


@torch.no_grad()
def lost_mass(target: Target, samples: Sequence[Sample], ids: Tensor) -> float:
    """The target's mean probability of tokens outside `ids`, over the predicted tokens of a few of
    the samples. A drafter with this vocabulary has an expected acceptance of at most 1 − this
    value."""
    teacher = LiveTeacher(target.model)
    kept = ids.to(target.device)
    lost, count = 0.0, 0
    for sample in spread(samples, LOST_MASS_SAMPLES):
        batch = collate([sample], target.tokenizer.pad_token_id or 0)
        predicted = sum(sample.mask[1:])
        signal = teacher.signal(**inputs(batch, target.device), ids=batch["ids"])
        logits = signal(slice(0, predicted)).logits
        lost += float((1 - logits.float().softmax(-1)[:, kept].sum(-1)).sum())
        count += predicted
    return lost / count


def dev_teacher(model: PreTrainedModel, sources: Sources | None = None) -> LiveTeacher:
    """The teacher of figures on dev text. sources: what the encoder reads; None: it has none."""
    return LiveTeacher(model, dev_features(model, [FINAL], sources))


def step_of(
    teacher: TeacherSource | None,
    sources: Sources | None,
    clock: TrainingClock,
) -> Step:
    """What the trainer runs in each step: the teacher's signal, then the loss. sources: what the
    encoders read; None: there are none."""

    def step(module: nn.Module, batch: Inputs, ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        signal, device = None, batch["input_ids"].device
        if teacher is not None:
            with clock("teacher"):
                signal = teacher.signal(**batch, ids=ids)
        return module(**batch, teacher=signal, **padded(sources, ids, device))

    return step


def padded(sources: Sources | None, ids: Sequence[str], device: torch.device) -> dict[str, Any]:
    """What the encoders read for a batch of samples, by the name of the argument."""
    return {} if sources is None else {"sources": padded_sources(sources, ids, device)}
