"""The settings of a `distill` stage."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from decode.base.errors import UserError
from distill.student_settings import (
    REFUSED_BY_SHARED,
    DrafterLora,
    ParallelConfig,
    StudentConfig,
    refuse,
)
from distill.teacher.cache_directory import holds_features
from train.settings.drafter_stages import (
    DRAFTER_STAGES,
    drafts_in_parallel,
    has_other_tokenizer,
    heads_stage,
    require_merged,
    require_own_weights,
)
from train.settings.optimizer_config import OptimizerConfig
from train.settings.schema import Check, Losses, StageConfig, closest_stage
from train.settings.text_settings import LossConfig, complete_target_part
from train.settings.training import DevConfig, LoopConfig, OnPolicyConfig


class DistillConfig(LossConfig):
    """A small language model learns the target's distribution (DistillSpec, 2310.08461)."""

    kind: Literal["distill"] = "distill"
    drafter: StudentConfig
    """Where the drafter starts."""
    losses: Losses = {"forward_kl": 1.0}
    """The weighted sum that is minimised: {name: weight}, or {name: {weight: …, option: …}}; see
    `distill.losses`."""
    teacher: str = "live"
    """live, or the name or directory of a teacher_cache stage (the target's likeliest tokens) or of
    a feature_cache stage (its complete distribution)."""
    on_policy: OnPolicyConfig | None = None
    """The drafter generates a part of the text itself. None: the text is fixed."""
    dev: DevConfig | None = None
    """Figures on a dev slice during the training. None: no figures."""
    train_embeddings: bool = True
    """Train the token embeddings and the output layer too. If false, they keep their init
    weights. The factors of an output layer (`output_rank`) are trained in any case."""
    lora: DrafterLora | None = None
    """Train adapters. None: train the weights themselves."""
    gradient_checkpointing: bool = False
    """Recompute the layers' activations in the backward pass: less memory, more time."""
    parallel: ParallelConfig | None = None
    """Train a drafter that drafts all tokens in one pass (PARD, 2504.18583). None: it drafts one
    token after the other."""
    draft_vocabulary: int | None = Field(None, ge=1)
    """Draft only this many of the text's most frequent tokens. None: all tokens, or the vocabulary
    of the stage that this stage continues, or of the cache."""
    output_rank: int | None = Field(None, ge=1)
    """r; the output layer of the draft vocabulary is then two trained factors, [r, H] and [V', r]
    (SlimSpec, 2605.10453), which start as near to the full layer as that rank can be. None: a full
    layer, or the one of the stage that this stage continues."""
    weights: Literal["int8"] | None = None
    """int8: the drafter reads one byte a weight, on machines that can. Its files keep all bits.
    None: it reads its weights as they are."""
    chunk_tokens: int = Field(256, ge=1)
    """The number of tokens whose logits are in memory at a time."""
    loop: LoopConfig = LoopConfig()
    """The length of the training and the size of its batches."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its learning rate."""

    def checks(self, earlier: Sequence[StageConfig]) -> Iterator[Check]:
        yield from super().checks(earlier)
        yield partial(self.loop.require_dev, self.name, self.dev, earlier)
        if self.drafter.stage is not None:
            yield partial(self._check_start, self.drafter.stage, earlier)
        if self.drafter.vocabulary is not None:
            yield partial(refuse, self, **REFUSED_BY_SHARED)
        if self.draft_vocabulary is None:
            reason = "it is of an output layer made for a draft_vocabulary"
            yield partial(refuse, self, output_rank=reason)
        yield partial(require_own_weights, self)
        if self.teacher != "live":
            yield partial(self._check_cache, earlier)
        if self.on_policy is not None:
            yield self._check_on_policy
        if not self.needs_teacher:
            yield partial(refuse, self, tokens_per_pass="no loss reads the teacher")
            yield self._check_confidence

    def needs_complete_target(self) -> str | None:
        return complete_target_part(self, {})

    def _check_confidence(self) -> None:
        if self.parallel is not None and self.parallel.confidence:
            raise UserError(
                f"stage {self.name}: parallel.confidence weighs by the target's probabilities, "
                "but no loss reads the target; add one to losses, such as forward_kl"
            )

    def _check_start(self, start: str, earlier: Sequence[StageConfig]) -> None:
        closest_stage(start, earlier, *DRAFTER_STAGES)
        require_merged(self.name, start, earlier)
        if heads_stage(start, earlier) is not None:
            raise UserError(
                f"stage {self.name} trains a small language model, but the drafter of {start} is "
                "heads on the target; name a stage that trains a small language model"
            )
        refuse(self, draft_vocabulary=f"the drafter of {start} keeps its draft vocabulary")
        is_shared = has_other_tokenizer(start, earlier)
        if is_shared != (self.drafter.vocabulary is not None):
            raise UserError(
                f"stage {self.name}: the drafter of {start} has "
                + (
                    "another tokenizer than the target; set drafter.vocabulary: shared here too"
                    if is_shared
                    else "the target's tokenizer; leave drafter.vocabulary out"
                )
            )
        is_parallel = drafts_in_parallel(start, earlier)
        if is_parallel and self.parallel is None:
            raise UserError(
                f"stage {self.name} would train the drafter of {start} to draft one token after "
                "the other, but that drafter drafts in parallel; set parallel"
            )
        if is_parallel and self.parallel is not None and self.parallel.mask_token is not None:
            raise UserError(
                f"stage {self.name}: the drafter of {start} keeps its mask token; leave out "
                "parallel.mask_token"
            )

    def _check_cache(self, earlier: Sequence[StageConfig]) -> None:
        directory = Path(self.teacher)
        if directory.is_dir():
            holds_states = holds_features(directory)
        else:
            stage: Any = closest_stage(self.teacher, earlier, "teacher_cache", "feature_cache")
            holds_states = stage.kind == "feature_cache"
            shares = self.drafter.vocabulary is not None
            if shares and not holds_states and stage.shared_with is None:
                raise UserError(
                    f"stage {self.name}: the drafter has another tokenizer than the target, but "
                    f"the cache of stage {self.teacher} is not over the tokens of both; set "
                    "shared_with in that stage"
                )
        if not holds_states:
            refuse(self, draft_vocabulary="the cache already sets the draft vocabulary")
        refuse(
            self,
            on_policy="the cache has no results for text that the drafter generates later",
            tokens_per_pass="a cache replaces the live target",
        )
        if self.teacher_temperature != 1 and not holds_states:
            raise UserError(
                f"stage {self.name} learns from a cache, and the cache has a fixed temperature; "
                "set `temperature` of the teacher_cache stage instead of teacher_temperature"
            )

    def _check_on_policy(self) -> None:
        if self.loop.max_steps is None:
            raise UserError(
                f"stage {self.name} trains on text that the drafter generates during the training, "
                "so it has no epochs; set loop.max_steps"
            )
        if not self.needs_teacher or "cross_entropy" in self.losses:
            raise UserError(
                f"stage {self.name}: cross_entropy would only teach the drafter to repeat the text "
                "that it generates; use a divergence from the teacher, such as reverse_kl"
            )
