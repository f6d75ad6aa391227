"""The student of a `distill` stage: the model that is trained, and its draft vocabulary."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from decode.base.errors import UserError
from decode.drafters.draft_vocabulary import ReducedVocabulary, reduce_output
from decode.drafters.pard import mark_parallel, stored_mask_token, unused_token
from distill.shared_vocabulary import SharedVocabulary
from distill.teacher.top_k_cache import CachedTeacher
from train.data.chat_tokens import Sample
from train.loop.open_caches import Cache
from train.loop.student_and_teacher import make_student
from train.stages.distill_config import DistillConfig, refuse
from train.stages.text_stages import TrainingStage

DistillLike = TrainingStage[DistillConfig]


def student_of(
    stage: DistillLike,
    shared: SharedVocabulary | None,
    samples: Sequence[Sample],
    cache: Cache | None,
) -> tuple[PreTrainedModel, ReducedVocabulary | None, dict[str, float]]:
    """The model to train, on the CPU; its draft vocabulary, in the ids of its tokenizer; and the
    vocabulary's coverage of the text, if it was chosen here.

    shared: what the target shares with a model that has another tokenizer; None: it has the
    target's. Raises UserError if the vocabularies of model, cache and settings do not fit together.
    """
    config = stage.config
    model, vocabulary = make_student(config.drafter, stage.target, stage.earlier)
    if stage.target.has_encoder:
        require_sources_fit(stage, model, samples)
    mask_token = mask_token_of(stage, model)
    if mask_token is not None:
        mark_parallel(model.config, mask_token)
    if shared is not None:
        coverage = stage.shared_coverage(shared, samples)
        require_room(stage, shared, model, samples)
        return model, _of_shared_tokens(stage, shared, model, vocabulary, cache), coverage
    if config.draft_vocabulary is not None:
        if vocabulary is not None:
            refuse(config, draft_vocabulary="the drafter's start already has one")
        ids, coverage = stage.frequent_tokens(samples, config.draft_vocabulary)
        return model, reduce_output(model, ids), coverage
    if isinstance(cache, CachedTeacher):
        expected = cache.vocabulary
        if vocabulary is None:
            return model, None if expected is None else reduce_output(model, expected), {}
        if expected is None or not torch.equal(vocabulary.ids, expected):
            raise UserError(
                f"the drafter has a draft vocabulary of {len(vocabulary.ids)} tokens, but the "
                f"teacher cache {cache.directory} has another one ("
                f"{'all tokens' if expected is None else f'{len(expected)} tokens'}); make the "
                "cache first, and let the drafter's first stage learn from it"
            )
    return model, vocabulary, {}


def _of_shared_tokens(
    stage: DistillLike,
    shared: SharedVocabulary,
    model: PreTrainedModel,
    vocabulary: ReducedVocabulary | None,
    cache: Cache | None,
) -> ReducedVocabulary:
    """Give the model an output layer with the rows of the shared tokens only, unless it has one.
    vocabulary: the vocabulary of the model's start."""
    name, spec = stage.config.name, stage.config.drafter.spec(stage.earlier)
    if isinstance(cache, CachedTeacher) and (
        cache.vocabulary is None or not torch.equal(cache.vocabulary, shared.target_ids)
    ):
        raise UserError(
            f"stage {name}: the teacher cache {cache.directory} is not over the tokens that the "
            f"drafter {spec} shares with the target; make the cache with shared_with, and name "
            "there the model that the drafter starts from"
        )
    if vocabulary is None:
        return reduce_output(model, shared.drafter_ids)
    if not torch.equal(vocabulary.ids, shared.drafter_ids):
        raise UserError(
            f"stage {name}: the drafter {spec} has a draft vocabulary of {len(vocabulary.ids)} "
            f"tokens, which are not the {len(shared.drafter_ids)} that it shares with the target; "
            "start from a model with its complete output layer"
        )
    return vocabulary


def require_room(
    stage: DistillLike, shared: SharedVocabulary, model: PreTrainedModel, samples: Sequence[Sample]
) -> None:
    """Raise UserError if a text is longer than the model's context, as the model reads it."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(shared.lengths(sample.tokens for sample in samples))
    if positions is not None and longest > positions:
        raise UserError(
            f"stage {stage.config.name}: the longest sample has {longest} tokens as the drafter "
            f"reads it, but {type(model).__name__} has a context of {positions}; set a lower "
            "max_length"
        )


def require_sources_fit(
    stage: DistillLike, model: PreTrainedModel, samples: Sequence[Sample]
) -> None:
    """Raise UserError if a source is longer than the student's encoder reads, or the target's."""
    longest = max(len(sample.source) for sample in samples)
    for name, encoded in (("the drafter", model), ("the target", stage.target.model)):
        positions = getattr(encoded.get_encoder().config, "max_position_embeddings", None)
        if positions is not None and longest > positions:
            raise UserError(
                f"stage {stage.config.name}: a source has {longest} tokens, but the encoder of "
                f"{name} reads at most {positions}; use text with shorter prompts"
            )


def mask_token_of(stage: DistillLike, model: PreTrainedModel) -> int | None:
    """The mask token of the drafter that starts as `model`. None: it drafts one token after the
    other. Raises UserError for a token in use, and for a parallel drafter without `parallel`."""
    config, stored = stage.config, stored_mask_token(model.config)
    if config.parallel is None:
        if stored is not None:
            raise UserError(
                f"stage {config.name}: the drafter starts as one that drafts in parallel (its "
                "config has pard_token), and this stage would train it to draft one token "
                "after the other; set parallel"
            )
        return None
    if config.parallel.mask_token is None and stored is not None:
        return stored
    rows = model.config.get_text_config().vocab_size
    try:
        return unused_token(config.parallel.mask_token, stage.target, rows)
    except UserError as error:
        raise UserError(f"stage {config.name}: parallel: {error}") from error


def require_unused(stage: DistillLike, mask_token: int | None, samples: Sequence[Sample]) -> None:
    """Raise UserError if a sample contains the mask token. None: there is none, and no sample is
    read."""
    if mask_token is None:
        return
    for sample in samples:
        if mask_token in sample.tokens:
            name = stage.target.tokenizer.convert_ids_to_tokens(mask_token)
            raise UserError(
                f"stage {stage.config.name}: the mask token {mask_token} ({name!r}) is in use: "
                f"the sample {sample.id} contains it; set parallel.mask_token to an id that no "
                "text contains"
            )
