"""Which settings of a `distill` stage fit together."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decode.base.errors import UserError
from distill.students import refuse, student_kind
from distill.teacher.cached_features import holds_features
from train.base.drafter_stages import (
    DRAFTER_STAGES,
    drafts_in_parallel,
    has_other_tokenizer,
    heads_stage,
    require_own_weights,
    require_whole,
)
from train.settings.distill_config import DistillConfig
from train.settings.schema import StageConfig, closest_stage


def check_settings(config: DistillConfig, earlier: Sequence[StageConfig]) -> None:
    """Raise UserError for settings that do not fit together, or an earlier stage that does not."""
    config.loop.require_dev(config.name, config.dev, earlier)
    if config.drafter.stage is not None:
        _check_start(config, config.drafter.stage, earlier)
    student_kind(config, encoder=False)  # refuses settings
    if config.draft_vocabulary is None:
        refuse(config, output_rank="it is of an output layer made for a draft_vocabulary")
    require_own_weights(config)
    if config.teacher != "live":
        _check_cache(config, earlier)
    if config.on_policy is not None:
        _check_on_policy(config)
    if not config.weighted_loss.needs_teacher:
        reason = "no loss reads the teacher"
        refuse(config, tokens_per_pass=reason)
        if config.parallel is not None and config.parallel.confidence:
            raise UserError(
                f"stage {config.name}: parallel.confidence weighs by the target's probabilities, "
                "but no loss reads the target; add one to losses, such as forward_kl"
            )


def _check_start(config: DistillConfig, start: str, earlier: Sequence[StageConfig]) -> None:
    closest_stage(start, earlier, *DRAFTER_STAGES)
    require_whole(config.name, start, earlier)
    if heads_stage(start, earlier) is not None:
        raise UserError(
            f"stage {config.name} trains a small language model, but the drafter of {start} is "
            "heads on the target; name a stage that trains a small language model"
        )
    refuse(config, draft_vocabulary=f"the drafter of {start} keeps its draft vocabulary")
    is_shared = has_other_tokenizer(start, earlier)
    if is_shared != (config.drafter.vocabulary is not None):
        raise UserError(
            f"stage {config.name}: the drafter of {start} has "
            + (
                "another tokenizer than the target; set drafter.vocabulary: shared here too"
                if is_shared
                else "the target's tokenizer; leave drafter.vocabulary out"
            )
        )
    is_parallel = drafts_in_parallel(start, earlier)
    if is_parallel and config.parallel is None:
        raise UserError(
            f"stage {config.name} would train the drafter of {start} to draft one token after the "
            "other, but that drafter drafts in parallel; set parallel"
        )
    if is_parallel and config.parallel is not None and config.parallel.mask_token is not None:
        raise UserError(
            f"stage {config.name}: the drafter of {start} keeps its mask token; leave out "
            "parallel.mask_token"
        )


def _check_cache(config: DistillConfig, earlier: Sequence[StageConfig]) -> None:
    directory = Path(config.teacher)
    if directory.is_dir():
        holds_states = holds_features(directory)
    else:
        stage: Any = closest_stage(config.teacher, earlier, "teacher_cache", "feature_cache")
        holds_states = stage.kind == "feature_cache"
        shares = config.drafter.vocabulary is not None
        if shares and not holds_states and stage.shared_with is None:
            raise UserError(
                f"stage {config.name}: the drafter has another tokenizer than the target, but the "
                f"cache of stage {config.teacher} is not over the tokens of both; set shared_with "
                "in that stage"
            )
    if not holds_states:
        refuse(config, draft_vocabulary="the cache already sets the draft vocabulary")
    refuse(
        config,
        on_policy="the cache has no results for text that the drafter generates later",
        tokens_per_pass="a cache replaces the live target",
    )
    if config.teacher_temperature != 1 and not holds_states:
        raise UserError(
            f"stage {config.name} learns from a cache, and the cache has a fixed temperature; set "
            "`temperature` of the teacher_cache stage instead of teacher_temperature"
        )


def _check_on_policy(config: DistillConfig) -> None:
    if config.loop.max_steps is None:
        raise UserError(
            f"stage {config.name} trains on text that the drafter generates during the training, "
            "so it has no epochs; set loop.max_steps"
        )
    if not config.weighted_loss.needs_teacher or "cross_entropy" in config.losses:
        raise UserError(
            f"stage {config.name}: cross_entropy would only teach the drafter to repeat the text "
            "that it generates; use a divergence from the teacher, such as reverse_kl"
        )
