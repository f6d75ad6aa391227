"""`teacher_cache`: the target's top-k log-probabilities of a text, for any number of trainings."""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from decode.errors import UserError
from distill.teacher.live import LiveTeacher
from distill.teacher.output_layer import split_model
from distill.teacher.signal import TopK
from distill.teacher.top_k_cache import (
    CachedTeacher,
    bytes_per_token,
    describe_teacher,
    top_k,
    write_part,
    write_vocabulary,
)
from train.data.chat import Sample
from train.schema import StageConfig
from train.stage import STAGES, Outcome, Stage, StageContext, StagePlan
from train.text_stages import (
    TextConfig,
    batches_of,
    check_text,
    fitting_samples,
    planned_tokens,
    size,
    write_parts,
)
from train.training.student_and_teacher import frequent_tokens


class TeacherCacheConfig(TextConfig):
    """k: the number of tokens kept of each distribution. temperature: of the target.
    draft_vocabulary: keep the distribution over this many of the text's most frequent tokens,
    renormalised. part_samples: the number of samples per written part; a killed stage loses at most
    one part."""

    kind: Literal["teacher_cache"] = "teacher_cache"
    k: int = Field(64, ge=1)
    temperature: float = Field(1.0, gt=0)
    draft_vocabulary: int | None = Field(None, ge=1)
    tokens_per_batch: int = Field(2048, ge=1)
    part_samples: int = Field(256, ge=1)
    chunk_tokens: int = Field(256, ge=1)


@STAGES.register("teacher_cache")
class TeacherCacheStage(Stage):
    """Writes part-0, part-1, … (`distill.teacher.top_k_cache`), and the draft vocabulary, if there
    is one."""

    Config = TeacherCacheConfig

    def check(self, earlier: Sequence[StageConfig]) -> None:
        settings: TeacherCacheConfig = self.config
        check_text(settings, earlier)
        if settings.draft_vocabulary is not None and settings.k > settings.draft_vocabulary:
            raise UserError(
                f"stage {settings.name}: k is {settings.k}, of a draft vocabulary of "
                f"{settings.draft_vocabulary} tokens; expected at most as many"
            )

    def plan(self, context: StageContext) -> StagePlan:
        settings: TeacherCacheConfig = self.config
        tokens = planned_tokens(context, settings)
        each = bytes_per_token(settings.k, self._vocabulary_size(context))
        return StagePlan(
            f"the target's top {settings.k}: {each} bytes a token, {size(each * tokens)} on disk",
            tokens=tokens,
            memory_bytes=sum(
                p.numel() * p.element_size() for p in context.target.model.parameters()
            ),
        )

    def run(self, context: StageContext) -> Outcome:
        settings: TeacherCacheConfig = self.config
        target = context.target
        samples, counts = fitting_samples(context, settings)
        vocabulary: Tensor | None = None
        coverage: dict[str, float] = {}
        if settings.draft_vocabulary is not None:
            vocabulary, coverage = frequent_tokens(context, samples, settings.draft_vocabulary)
            if context.accelerator.is_main_process:
                write_vocabulary(context.directory, vocabulary)
        vocab_size = self._vocabulary_size(context)
        if settings.k > vocab_size:
            raise UserError(
                f"stage {settings.name}: k is {settings.k}, of a vocabulary of {vocab_size} tokens"
            )
        tokens = sum(sum(sample.mask[1:]) for sample in samples)
        each = bytes_per_token(settings.k, vocab_size)
        context.reporter.say(f"  {each} bytes a token, {tokens} tokens: {size(each * tokens)}")
        described = describe_teacher(
            target, k=settings.k, temperature=settings.temperature, vocabulary=vocabulary
        )
        ids = None if vocabulary is None else vocabulary.to(target.device)
        teacher = LiveTeacher(split_model(target.model), vocabulary=ids, tokens=target.token_count)

        def write(number: int, part: Sequence[Sample], names: list[tuple[str, str]]) -> int:
            signals = self._score(context, teacher, part)
            write_part(context.directory, number, names, signals, vocab_size, described)
            return sum(len(signal.ids) for signal in signals)

        speed = write_parts(context, samples, settings.part_samples, write)
        CachedTeacher(context.directory, target)  # checks: complete, and made from this target
        return Outcome(
            summary={
                "samples": counts,
                "tokens": tokens,
                "k": settings.k,
                "bytes_per_token": each,
                **coverage,
                "tokens_per_second": speed,
            }
        )

    @torch.no_grad()
    def _score(
        self, context: StageContext, teacher: LiveTeacher, part: Sequence[Sample]
    ) -> list[TopK]:
        """The top-k signal of each sample of a part, in order."""
        settings: TeacherCacheConfig = self.config
        found: list[TopK | None] = [None] * len(part)
        for rows, batch, given in batches_of(context, part, settings.tokens_per_batch):
            signal = teacher.signal(**given, ids=batch["ids"])
            counts = batch["loss_mask"][:, 1:].sum(1).tolist()
            pieces = [
                top_k(
                    signal(slice(i, i + settings.chunk_tokens)).logits,
                    settings.k,
                    settings.temperature,
                )
                for i in range(0, sum(counts), settings.chunk_tokens)
            ]
            begin = 0
            whole = TopK(
                *(
                    torch.cat([getattr(p, name) for p in pieces])
                    for name in ("ids", "log_p", "log_tail")
                )
            )
            for i, count in zip(rows, counts, strict=True):
                found[i] = whole[begin : begin + count]
                begin += count
        return [signal for signal in found if signal is not None]

    def _vocabulary_size(self, context: StageContext) -> int:
        return self.config.draft_vocabulary or context.target.token_count
