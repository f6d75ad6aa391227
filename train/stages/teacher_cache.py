"""`teacher_cache`: the target's top-k log-probabilities of a text, for any number of trainings."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from decode.base.errors import UserError
from distill.students.shared_vocabulary_student import SharedVocabulary
from distill.teacher.linear_logits import require_linear_logits
from distill.teacher.live_teacher import LiveTeacher
from distill.teacher.teacher_signal import TopK
from distill.teacher.top_k_cache import (
    CachedTeacher,
    bytes_per_token,
    describe_teacher,
    top_k,
    write_top_k_part,
    write_vocabulary,
)
from train.base.stage import STAGES, StageMemory, StagePlan, StageResult
from train.data.batches import batches_for
from train.data.chat_tokens import Sample
from train.loop.estimates import forward_bytes
from train.settings.cache_configs import TeacherCacheConfig
from train.stages.text_stages import CacheStage


@STAGES.register("teacher_cache")
class TeacherCacheStage(CacheStage[TeacherCacheConfig]):
    """Writes part-0, part-1, … (`distill.teacher.top_k_cache`), and the draft vocabulary, if there
    is one."""

    def plan(self, plans: Mapping[str, StagePlan]) -> StagePlan:
        k, vocab_size = self.config.k, self._vocabulary_size
        if k > vocab_size:
            raise UserError(
                f"stage {self.config.name}: k is {k}, but the vocabulary has only {vocab_size} "
                "tokens; lower k"
            )
        tokens, token_bytes = self.planned_tokens(plans), bytes_per_token(k, vocab_size)
        require_linear_logits(self.target.model)
        return StagePlan(
            f"the target's top {k}: {token_bytes} bytes a token",
            tokens=tokens,
            memory=StageMemory(
                target=self.target_bytes,
                activations=forward_bytes(self.target.model, self.config.tokens_per_batch),
            ),
            disk_bytes=token_bytes * tokens,
        )

    def run(self) -> StageResult:
        config, target, vocab_size = self.config, self.target, self._vocabulary_size
        samples, counts = self.fitting_samples()
        vocabulary, coverage = self._vocabulary(samples)
        predicted = samples.predicted.astype(np.int64)
        token_bytes = bytes_per_token(config.k, vocab_size)
        made_with = describe_teacher(
            target, k=config.k, temperature=config.temperature, vocabulary=vocabulary
        )
        ids = None if vocabulary is None else vocabulary.to(target.device)
        teacher = LiveTeacher(target.model, vocabulary=ids, tokens=target.token_count)

        def write(number: int, part: Sequence[Sample], hashes: list[tuple[str, str]]) -> int:
            signals = self._score(teacher, part)
            write_top_k_part(self.directory, number, hashes, signals, vocab_size, made_with)
            return sum(len(signal.ids) for signal in signals)

        _, speed, work = self.write_parts(samples, predicted, token_bytes, write, logits=vocab_size)
        CachedTeacher(self.directory, target)  # checks: complete, and made from this target
        return StageResult(
            summary={
                "samples": counts,
                "tokens": int(predicted.sum()),
                "k": config.k,
                "bytes_per_token": token_bytes,
                **coverage,
                "tokens_per_second": speed,
            },
            work=work,
        )

    def _vocabulary(self, samples: Sequence[Sample]) -> tuple[Tensor | None, dict[str, float]]:
        """The draft vocabulary, which is also written, and its coverage."""
        if self._shared is not None:
            vocabulary = self._shared.target_ids
            covered = self._shared.coverage((sample.tokens, sample.mask) for sample in samples)
            coverage = self.coverage(samples, vocabulary, covered, "shared vocabulary")
        elif self.config.draft_vocabulary is None:
            return None, {}
        else:
            vocabulary, coverage = self.frequent_tokens(samples, self.config.draft_vocabulary)
        if self.accelerator.is_main_process:
            write_vocabulary(self.directory, vocabulary)
        return vocabulary, coverage

    @torch.no_grad()
    def _score(self, teacher: LiveTeacher, part: Sequence[Sample]) -> list[TopK]:
        """The top-k signal of each sample of a part, in order."""
        config = self.config
        signals: dict[int, TopK] = {}
        for rows, batch, tensors in batches_for(self.target, part, config.tokens_per_batch):
            signal = teacher.signal(**tensors, ids=batch["ids"])
            counts = batch["loss_mask"][:, 1:].sum(1).tolist()
            parts = (
                slice(begin, begin + config.chunk_tokens)
                for begin in range(0, sum(counts), config.chunk_tokens)
            )
            chunks = [top_k(signal(part).logits, config.k, config.temperature) for part in parts]
            names = ("ids", "log_p", "log_tail")
            joined = TopK(*(torch.cat([getattr(x, name) for x in chunks]) for name in names))
            begin = 0
            for i, count in zip(rows, counts, strict=True):
                signals[i] = joined[begin : begin + count]
                begin += count
        return [signals[i] for i in range(len(part))]

    @property
    def _vocabulary_size(self) -> int:
        if self._shared is not None:
            return len(self._shared.target_ids)
        return self.config.draft_vocabulary or self.target.token_count

    @cached_property
    def _shared(self) -> SharedVocabulary | None:
        """What the target shares with the model of `shared_with`."""
        name = self.config.shared_with
        return None if name is None else SharedVocabulary.of_model(name, self.target)
