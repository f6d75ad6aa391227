"""The target as a teacher, and what a draft vocabulary loses of its distribution."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.model.loading import Target
from decode.model.sharded import shard_layers
from distill.teacher.feature_sources import LiveFeatures
from distill.teacher.teacher_signal import (
    LiveTeacher,
    StatesTeacher,
    TeacherSource,
    split_model,
)
from distill.teacher.top_k_cache import CachedTeacher
from train.data.batches import collate, inputs
from train.data.chat_tokens import Sample
from train.data.read import spread
from train.loop.live_window import LiveWindow
from train.loop.open_caches import Cache
from train.loop.trainer import Clock

# Number of samples for measuring the probability mass that a draft vocabulary loses.
LOST_MASS_SAMPLES = 16


@torch.no_grad()
def lost_mass(target: Target, samples: Sequence[Sample], ids: Tensor) -> float:
    """The target's mean probability of tokens outside `ids`, over the predicted tokens of a few of
    the samples. A drafter with this vocabulary has an expected acceptance of at most 1 − this
    value."""
    teacher = LiveTeacher(split_model(target.model))
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


@contextmanager
def teaching_model(target: Target, *, shard: bool) -> Iterator[PreTrainedModel]:
    """The target's model as a teacher. With `shard`, it is a copy sharded over the ranks; the
    complete model stays in CPU memory inside this context."""
    if not shard:
        yield target.model
        return
    device = target.device
    target.model.to("cpu")
    try:
        sharded = copy.deepcopy(target.model)
        shard_layers(sharded.base_model, device.type, "shard_teacher")
        yield sharded.to(device)
    finally:
        target.model.to(device)


def teacher_of(
    target: PreTrainedModel,
    source: LiveWindow | LiveFeatures | Cache | None,
    vocabulary: Tensor | None,
    *,
    tokens: int,
    remember: bool,
    clock: Clock,
) -> TeacherSource:
    """The teacher: on the results of `source` if there is one, otherwise the live target. A target
    with an encoder needs a source.

    vocabulary: int64 [n], the draft vocabulary; None: all tokens, which are the first `tokens` rows
    of the output layer. remember: keep the live target's results after their first use. clock:
    records the teacher's time as `teacher`.
    """
    if isinstance(source, CachedTeacher):
        return source
    model = split_model(target)
    if source is not None:
        return StatesTeacher(
            model, source, vocabulary=vocabulary, tokens=tokens, timed=partial(clock, "teacher")
        )
    return LiveTeacher(
        model,
        remember=remember,
        vocabulary=vocabulary,
        tokens=tokens,
        timed=partial(clock, "teacher"),
    )
