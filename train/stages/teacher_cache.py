"""`teacher_cache`: the target's top-k log-probabilities of a text, for any number of trainings."""

import time
from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from decode.artifact import verify_directory
from decode.errors import UserError
from distill.cache import (
    PART,
    CachedTeacher,
    bytes_per_token,
    describe_teacher,
    text_sha256,
    top_k,
    write_part,
    write_vocabulary,
)
from distill.output import split_model
from distill.signal import TopK
from distill.teacher import LiveTeacher
from train.data.batches import bucket_batches, collate, inputs
from train.data.chat import Sample
from train.samples import TextConfig, fitting_samples, planned_tokens
from train.schema import StageConfig, closest_stage
from train.stage import STAGES, Outcome, Plan, Stage, StageContext
from train.student import frequent_tokens


class TeacherCacheConfig(TextConfig):
    """k: tokens kept of each distribution. temperature: of the target. draft_vocabulary: keep the
    distribution over the so many most frequent tokens of the text, renormalised. part_samples: are
    written at a time; a killed stage loses at most one part."""

    kind: Literal["teacher_cache"] = "teacher_cache"
    k: int = Field(64, ge=1)
    temperature: float = Field(1.0, gt=0)
    draft_vocabulary: int | None = Field(None, ge=1)
    tokens_per_batch: int = Field(2048, ge=1)
    part_samples: int = Field(256, ge=1)
    chunk_tokens: int = Field(256, ge=1)


@STAGES.register("teacher_cache")
class TeacherCacheStage(Stage):
    """Writes part-0, part-1, … (`distill.cache`), and the draft vocabulary, if there is one."""

    Config = TeacherCacheConfig

    def check(self, earlier: Sequence[StageConfig]) -> None:
        settings: TeacherCacheConfig = self.config
        for name in settings.text_stages:
            closest_stage(name, earlier, "generate")
        if settings.draft_vocabulary is not None and settings.k > settings.draft_vocabulary:
            raise UserError(
                f"stage {settings.name}: k is {settings.k}, of a draft vocabulary of "
                f"{settings.draft_vocabulary} tokens; expected at most as many"
            )

    def plan(self, context: StageContext) -> Plan:
        settings: TeacherCacheConfig = self.config
        tokens = planned_tokens(context, settings)
        size = bytes_per_token(settings.k, self._vocabulary_size(context))
        return Plan(
            f"the target's top {settings.k}: {size} bytes a token, {_size(size * tokens)} on disk",
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
        size = bytes_per_token(settings.k, vocab_size)
        context.reporter.say(f"  {size} bytes a token, {tokens} tokens: {_size(size * tokens)}")
        described = describe_teacher(
            target, k=settings.k, temperature=settings.temperature, vocabulary=vocabulary
        )
        ids = None if vocabulary is None else vocabulary.to(target.device)
        teacher = LiveTeacher(split_model(target.model), vocabulary=ids)
        rank, world = context.accelerator.process_index, context.accelerator.num_processes
        begin, scored = time.perf_counter(), 0
        with context.reporter.bar("scoring", len(samples)) as bar:
            for number, first in enumerate(range(0, len(samples), settings.part_samples)):
                part = samples[first : first + settings.part_samples]
                directory = context.directory / f"{PART}{number}"
                if directory.exists():
                    verify_directory(directory)
                elif number % world == rank:
                    # Whole parts of its own for each rank; no exchange, so none waits.
                    signals = self._score(context, teacher, part)
                    names = [(s.id, text_sha256(s.tokens, s.mask)) for s in part]
                    write_part(context.directory, number, names, signals, vocab_size, described)
                    scored += sum(len(signal.ids) for signal in signals)
                bar.update(first + len(part))
        context.accelerator.wait_for_everyone()
        CachedTeacher(context.directory, target)  # whole, and readable as what it was made from
        seconds = time.perf_counter() - begin
        return Outcome(
            summary={
                "samples": counts,
                "tokens": tokens,
                "k": settings.k,
                "bytes_per_token": size,
                **coverage,
                "tokens_per_second": scored / seconds if scored else None,
            }
        )

    @torch.no_grad()
    def _score(
        self, context: StageContext, teacher: LiveTeacher, part: Sequence[Sample]
    ) -> list[TopK]:
        """The signal of each sample of a part, in its order."""
        settings: TeacherCacheConfig = self.config
        found: list[TopK | None] = [None] * len(part)
        pad_id = context.target.tokenizer.pad_token_id or 0
        for rows in bucket_batches(
            [len(sample.tokens) for sample in part],
            tokens_per_batch=settings.tokens_per_batch,
            seed=0,
            epoch=0,
        ):
            batch = collate([part[i] for i in rows], pad_id)
            signal = teacher.signal(**inputs(batch, context.target.device), ids=batch["ids"])
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
        return self.config.draft_vocabulary or context.target.vocab_size


def _size(count: float) -> str:
    return f"{count / 2**20:.1f} MiB" if count < 2**30 else f"{count / 2**30:.1f} GiB"
