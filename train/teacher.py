"""The teacher of a stage: the live target, or a cache that an earlier stage wrote."""

import copy
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from decode.target.hidden_states import FINAL
from distill.teacher.cache_parts import text_sha256
from distill.teacher.feature_sources import CachedFeatures, holds_features
from distill.teacher.teacher_signal import (
    CachedStatesTeacher,
    LiveTeacher,
    TeacherSource,
    shard_layers,
    split_model,
)
from distill.teacher.top_k_cache import CachedTeacher
from train.data.chat import Sample
from train.stage import StageContext
from train.training.clock import Clock

Cache = CachedTeacher | CachedFeatures


def open_cache(name: str, context: StageContext, samples: Sequence[Sample]) -> Cache:
    """The cache of a `teacher_cache` or `feature_cache` stage, or in a directory. Raises UserError
    if it was made from another target, or lacks one of the samples."""
    directory = _directory(name, context)
    if holds_features(directory):
        return open_features(name, context, samples, [FINAL])
    cache = CachedTeacher(directory, context.target)
    cache.require(_texts(samples))
    return cache


def open_features(
    name: str, context: StageContext, samples: Sequence[Sample], captured_layers: Sequence[int]
) -> CachedFeatures:
    """The hidden states at `captured_layers`, from a `feature_cache` stage or
    from a directory. Raises UserError as `open_cache` does."""
    cache = CachedFeatures(_directory(name, context), context.target, captured_layers)
    cache.require(_texts(samples))
    return cache


def _directory(name: str, context: StageContext) -> Path:
    return context.outcomes.get(name, Path(name))


def _texts(samples: Sequence[Sample]) -> list[tuple[str, str]]:
    return [(sample.id, text_sha256(sample.tokens, sample.mask)) for sample in samples]


class TargetModel:
    """The target's model as a teacher. With `shard`, this is a copy sharded over the ranks; the
    complete model stays in CPU memory meanwhile."""

    def __init__(self, context: StageContext, *, shard: bool) -> None:
        self.whole, self.shard = context.target.model, shard
        self.device = context.target.device

    def __enter__(self) -> PreTrainedModel:
        if not self.shard:
            return self.whole
        self.whole.to("cpu")
        part = copy.deepcopy(self.whole)
        shard_layers(part.base_model, self.device.type)
        return part.to(self.device)

    def __exit__(self, *_: object) -> None:
        self.whole.to(self.device)


def teacher_of(
    target: PreTrainedModel,
    cache: Cache | None,
    vocabulary: Tensor | None,
    *,
    tokens: int,
    remember: bool,
    clock: Clock,
) -> TeacherSource:
    """The teacher: `cache` if given, otherwise the live target.

    vocabulary: int64 [n], the draft vocabulary; None: all tokens, which are the first `tokens` rows
    of the output layer. remember: keep the live target's results after their first use. clock:
    records the teacher's time as `teacher`.
    """
    if isinstance(cache, CachedTeacher):
        return cache
    model = split_model(target)
    if cache is not None:
        return CachedStatesTeacher(
            model, cache, vocabulary=vocabulary, tokens=tokens, timed=lambda: clock("teacher")
        )
    return LiveTeacher(
        model,
        remember=remember,
        vocabulary=vocabulary,
        tokens=tokens,
        timed=lambda: clock("teacher"),
    )
