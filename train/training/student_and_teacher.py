"""A stage's student and its teacher."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import model_validator
from torch import Tensor
from transformers import PreTrainedModel

from decode.drafters.directory import describe_drafter
from decode.drafters.draft_vocabulary import ReducedVocabulary, load_vocabulary
from decode.errors import UserError
from decode.target.hidden_states import FINAL
from decode.target.identity import fingerprint, require_same_vocabulary
from decode.target.loading import load_model_and_tokenizer
from distill.student import student_from_config, student_from_layers
from distill.teacher.from_hidden_states import CachedStatesTeacher
from distill.teacher.hidden_state_cache import CachedFeatures, holds_features
from distill.teacher.live import LiveTeacher, TeacherSource
from distill.teacher.output_layer import split_model
from distill.teacher.parts import text_sha256
from distill.teacher.sharding import shard_layers
from distill.teacher.top_k_cache import CachedTeacher
from distill.vocabulary import most_frequent
from train.data.batches import collate, inputs
from train.data.chat import Sample
from train.data.read import spread
from train.schema import Strict
from train.stage import StageContext
from train.training.time_and_memory import Clock

# Kinds of stages that make small language models, which later stages can continue to train.
DRAFTER_STAGES = ("distill", "online")
# Number of samples for measuring the probability mass that a draft vocabulary loses.
LOST_MASS_SAMPLES = 16


class StudentConfig(Strict):
    """Where the drafter starts: exactly one of these settings.

    layers: a subset of the target's layers. model: an existing smaller model with the same
    tokenizer (hub id, directory, GGUF file); its output layer may be padded to another size.
    config: changes to the target's config, for a model with random weights. stage: the drafter of
    an earlier distill or online stage.
    """

    layers: list[int] | None = None
    model: str | None = None
    config: dict[str, Any] | None = None
    stage: str | None = None

    @model_validator(mode="after")
    def _one(self) -> "StudentConfig":
        given = [name for name, value in self if value is not None]
        if len(given) != 1:
            raise ValueError(
                f"found {', '.join(given) or 'nothing'}; expected exactly one of layers, model, "
                "config, stage"
            )
        return self

    def provenance(self, context: StageContext) -> Any:
        """The drafter's start, for the provenance in its description."""
        if self.stage is not None:
            return describe_drafter(context.outcomes[self.stage] / "drafter")["provenance"]
        return self.model_dump(exclude_none=True)


def make_student(
    start: StudentConfig, context: StageContext
) -> tuple[PreTrainedModel, ReducedVocabulary | None]:
    """The model to train, float32 on the CPU, and its reduced draft vocabulary, if it has one.

    Raises UserError for layers that the target does not have, a model with another vocabulary or
    with too few output rows for it, and a damaged drafter.
    """
    target = context.target
    if start.layers is not None:
        return student_from_layers(target.model, start.layers).cpu(), None
    if start.config is not None:
        return student_from_config(target.model, start.config).cpu(), None
    spec = start.model or ""
    if start.stage is not None:
        spec = str(context.outcomes[start.stage] / "drafter")
        describe_drafter(Path(spec))
    loaded = load_model_and_tokenizer(spec, dtype="float32", device="cpu")
    own = fingerprint(loaded.tokenizer, loaded.model.config, loaded.model.generation_config)
    require_same_vocabulary(own, target.fingerprint, f"drafter {spec}", padding=True)
    if own.vocab_size < target.token_count:
        raise UserError(
            f"drafter {spec} has {own.vocab_size} output rows and its tokenizer knows "
            f"{target.token_count} tokens, so it has no row for some that it is to learn; resize "
            "it first (transformers: resize_token_embeddings)"
        )
    return loaded.model.train(), load_vocabulary(Path(spec), loaded.model)


def choose_trained(model: PreTrainedModel, *, embeddings: bool) -> None:
    """Make all weights trainable, or all except the token embeddings and the output layer."""
    model.requires_grad_(True)
    if not embeddings:
        model.get_input_embeddings().requires_grad_(False)
        model.get_output_embeddings().requires_grad_(False)


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Recompute the layers' activations in the backward pass instead of keeping them."""
    # transformers 5.23 uses another name.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    # The embeddings may be frozen, but a checkpointed layer needs an input with a gradient.
    model.enable_input_require_grads()


def frequent_tokens(
    context: StageContext, samples: Sequence[Sample], count: int
) -> tuple[Tensor, dict[str, float]]:
    """The `count` most frequent tokens of the samples' text, int64 ascending, always including the
    end-of-text tokens; and their coverage for the stage's summary. Also prints the coverage."""
    ids, coverage = most_frequent(
        (sample.tokens for sample in samples),
        count,
        context.target.vocab_size,
        always=context.target.eos_token_ids,
    )
    lost = lost_mass(context, spread(samples, LOST_MASS_SAMPLES), ids)
    context.reporter.say(
        f"  draft vocabulary: {len(ids)} tokens cover {coverage:.2%} of the text; the target gives "
        f"{lost:.2%} of its probability there to others"
    )
    return ids, {"draft_vocabulary_coverage": coverage, "draft_vocabulary_lost_mass": lost}


@torch.no_grad()
def lost_mass(context: StageContext, samples: Sequence[Sample], ids: Tensor) -> float:
    """The target's mean probability of tokens outside `ids`, over the predicted tokens of the
    samples. A drafter with this vocabulary has an expected acceptance of at most 1 − this value."""
    target = context.target
    teacher = LiveTeacher(split_model(target.model))
    kept = ids.to(target.device)
    lost, count = 0.0, 0
    for sample in samples:
        batch = collate([sample], target.tokenizer.pad_token_id or 0)
        predicted = sum(sample.mask[1:])
        signal = teacher.signal(**inputs(batch, target.device), ids=batch["ids"])
        logits = signal(slice(0, predicted)).logits
        lost += float((1 - logits.float().softmax(-1)[:, kept].sum(-1)).sum())
        count += predicted
    return lost / count


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
