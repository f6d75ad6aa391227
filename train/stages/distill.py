"""`distill`: a small language model learns the target's distribution (DistillSpec, 2310.08461)."""

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.drafters import Drafter
from decode.drafters.draft_vocabulary import ReducedVocabulary, save_with_vocabulary
from decode.drafters.pard import (
    ParallelLMDrafter,
    stored_mask_token,
)
from decode.drafters.small_lm import SmallLMDrafter
from decode.drafters.tokenizers.shared_tokens import SharedVocabularyDrafter
from decode.measure.ranks import Ranks
from decode.model.cache.cached_model import require_decoding, require_trees
from decode.model.hidden_states import FINAL
from decode.model.loading import Target
from decode.model.pretrained import is_sharded
from decode.opening.directory import save_drafter
from distill.distillation_loss import Distillation
from distill.encoder_decoder import EncoderDecoderDistillation
from distill.parallel_distillation import (
    ParallelDistillation,
    require_full_attention,
)
from distill.shared_vocabulary import SharedVocabulary, SharedVocabularyDistillation
from distill.teacher.decoder_states import padded_sources
from distill.teacher.feature_sources import LiveFeatures
from distill.teacher.teacher_signal import (
    LiveTeacher,
    StatesTeacher,
    TeacherSource,
    require_linear_logits,
    split_model,
)
from distill.teacher.top_k_cache import CachedTeacher
from distill.trainable_model import Trainable
from train.base.schema import StageConfig
from train.base.stage import STAGES, Outcome, StagePlan
from train.data.batches import Inputs
from train.data.chat_tokens import Sample
from train.data.training_text import FixedText, OnPolicyText, Text
from train.loop.boosting import (
    Reading,
    TokenWeights,
    check_earlier_drafter,
    stored_guesses,
)
from train.loop.dev_slice import DevConfig, DevSlice, Judging
from train.loop.estimates import (
    planned_tokens,
    steps_in_words,
    time_limit,
    training_disk_bytes,
)
from train.loop.live_window import LiveWindow, look_ahead_of
from train.loop.meters.stage_flops import distill_flops
from train.loop.open_caches import Cache, open_cache
from train.loop.student_and_teacher import (
    checkpoint_layers,
    choose_trained,
    make_student,
    shared_vocabulary,
    start_provenance,
    teacher_of,
    teaching_model,
)
from train.loop.trainer import Clock, Trainer
from train.loop.training_task import TrainingTask
from train.stages.distill_config import DistillConfig, check_settings, check_with_encoder
from train.stages.distill_student import (
    mask_token_of,
    require_room,
    require_sources_fit,
    require_unused,
    student_of,
)
from train.stages.text_stages import TrainingStage, complete_target_part
from train.stages.training_memory import distill_memory


@STAGES.register("distill")
class DistillStage(TrainingStage[DistillConfig]):
    """Trains a small LM on text, with the target as the teacher, and writes it to `drafter/`."""

    Config = DistillConfig
    with_encoder = True

    @classmethod
    def check(cls, config: DistillConfig, earlier: Sequence[StageConfig]) -> None:
        super().check(config, earlier)
        check_settings(config, earlier)

    @classmethod
    def needs_complete_target(cls, config: DistillConfig) -> str | None:
        used = {
            "shard_teacher": config.shard_teacher,
            "remember_teacher": config.remember_teacher,
        }
        return complete_target_part(config, used)

    def plan(self, plans: Mapping[str, StagePlan]) -> StagePlan:
        config = self.config
        if self.target.has_encoder:
            check_with_encoder(config)
        elif config.draft_vocabulary is not None or (
            config.weighted_loss.needs_teacher and config.teacher == "live"
        ):
            require_linear_logits(self.target.model)
        for name in config.boost.names if config.boost else ():
            if name not in plans:
                check_earlier_drafter(Path(name), self.target)
        tokens = planned_tokens(self.planned_tokens(plans), config.loop)
        steps = steps_in_words(tokens, config.loop, config.optimizer.warmup_steps)
        amount = f"{config.loop.epochs} epochs, {steps}"
        if config.on_policy is not None:
            tokens = (config.loop.max_steps or 0) * config.loop.tokens_per_batch
            amount = f"{config.loop.max_steps} steps, λ = {config.on_policy.fraction:g}"
        if config.drafter.stage is not None:
            start = plans[config.drafter.stage]
            what = f"continues to train the drafter of {config.drafter.stage}"
            return StagePlan(
                f"{what}; {config.losses_in_words}; {amount}",
                start.trained_parameters,
                tokens,
                start.memory,
                start.disk_bytes,
                max_seconds=time_limit(config.loop),
                drafters=1,
            )
        model, _ = make_student(config.drafter, self.target, self.earlier)
        require_decoding(model)
        if not self.target.has_encoder:
            require_linear_logits(model)
        shared = self._shared  # refuses too few shared tokens
        if mask_token_of(self, model) is not None:
            require_full_attention(model)
            require_trees(model)  # training feeds masks and positions of the same kind
        choose_trained(model, embeddings=config.train_embeddings)
        student = Trainable(model, lora=config.lora).model
        trained = sum(p.numel() for p in student.parameters() if p.requires_grad)
        parameters = sum(p.numel() for p in student.parameters())
        memory = distill_memory(
            config,
            model,
            self.target,
            target_bytes=self.target_bytes,
            parameters=parameters,
            trained=trained,
            remembered=self.planned_text_tokens(plans) if config.remember_teacher else 0,
            processes=self.processes,
            itemsize=self.product_bytes,
        )
        ema = config.optimizer.ema is not None
        tokens_of_both = "" if shared is None else f"{len(shared.target_ids)} shared tokens; "
        return StagePlan(
            f"{type(model).__name__} of {student.num_parameters() / 1e6:.1f}M parameters; "
            f"{tokens_of_both}{config.losses_in_words}; {amount}",
            trained_parameters=trained,
            tokens=tokens,
            memory=memory,
            disk_bytes=training_disk_bytes(parameters, trained, average=ema, loop=config.loop),
            max_seconds=time_limit(config.loop),
            drafters=2,
        )

    def run(self) -> Outcome:
        config = self.config
        samples, counts = self.fitting_samples()
        # Before the student exists, so that the earlier drafters are not in memory beside it.
        weights = self._token_weights(samples)
        cache = None
        if config.teacher != "live":
            cache = open_cache(
                self.cache_directory(config.teacher), self.target, samples, self.accelerator
            )
        student, vocabulary, coverage = self._prepare(samples, cache)
        require_unused(self, stored_mask_token(student.model.config), samples)
        with teaching_model(self.target, shard=config.shard_teacher) as model:
            trainer = self._trainer(student, vocabulary, samples, model, cache, weights)
            progress = trainer.fit()
        drafter = student.plain(trainer.drafter_weights("student."))
        if self.accelerator.is_main_process:
            start = start_provenance(config.drafter, self.earlier)
            self._save("drafter", *drafter, self.provenance(progress) | {"start": start})
        summary = self.summary(trainer, counts, drafter[0].num_parameters())
        summary |= {"draft_vocabulary": None if vocabulary is None else len(vocabulary), **coverage}
        summary |= {} if weights is None else {"missed_share": weights.missed}
        self.accelerator.free_memory()
        return Outcome(self.directory / "drafter", summary)

    def _token_weights(self, samples: Sequence[Sample]) -> TokenWeights | None:
        """The weights of the text's tokens in the loss. None: the same for all."""
        config = self.config
        if config.boost is None:
            return None
        paths = [
            self.earlier[name] / "drafter" if name in self.earlier else Path(name)
            for name in config.boost.names
        ]
        ranks, per_batch = Ranks.of(self.accelerator), config.loop.tokens_per_batch
        reading = Reading(
            self.accelerator.device,
            self.target.token_count,
            max(1, per_batch // ranks.world),
            config.chunk_tokens,
        )
        with self.reporter.bar("earlier drafters", len(paths) * len(samples)) as bar:
            right = stored_guesses(self.directory, paths, samples, reading, ranks, bar.update)
        weights = TokenWeights(config.boost, samples, right)
        self.reporter.say(f"  the earlier drafters miss {weights.missed:.1%} of the text's tokens")
        return weights

    def _prepare(
        self, samples: Sequence[Sample], cache: Cache | None
    ) -> tuple[Trainable, Tensor | None, dict[str, float]]:
        """The student on the accelerator's device; the target's ids of its draft vocabulary there,
        None for all tokens; and the vocabulary's coverage of the text, if it was chosen here. Saves
        a new student as `start/`."""
        config, device = self.config, self.accelerator.device
        # Random weights and adapters must not depend on what ran before this stage.
        torch.manual_seed(config.loop.seed)
        model, vocabulary, coverage = student_of(self, self._shared, samples, cache)
        choose_trained(model, embeddings=config.train_embeddings)
        student = Trainable(model, vocabulary, config.lora)
        if self.accelerator.is_main_process and config.drafter.stage is None:
            self._save("start", *student.plain({}), {"stage": config.name, "steps": 0})
        if config.gradient_checkpointing:
            checkpoint_layers(model)
        model.to(device)
        if self._shared is not None:
            return student, self._shared.target_ids.to(device), coverage
        return student, None if vocabulary is None else vocabulary.ids.to(device), coverage

    @cached_property
    def _shared(self) -> SharedVocabulary | None:
        """What the target shares with a student that has another tokenizer."""
        start = self.config.drafter
        if start.vocabulary is None:
            return None
        return shared_vocabulary(start.spec(self.earlier), self.target)

    def _trainer(
        self,
        student: Trainable,
        vocabulary: Tensor | None,
        samples: Sequence[Sample],
        model: PreTrainedModel,
        cache: Cache | None,
        weights: TokenWeights | None,
    ) -> Trainer:
        """model: the target's, as a teacher. weights: the weights of the tokens in the loss."""
        config, loss = self.config, self.config.weighted_loss
        tokens = self.target.token_count
        clock = Clock(self.accelerator.device)
        teacher: TeacherSource | None = None
        source: LiveWindow | LiveFeatures | Cache | None = None
        sources = {s.id: s.source for s in samples} if self.target.has_encoder else None
        if loss.needs_teacher:
            source = cache or self._live_features(model, clock, sources)
            teacher = teacher_of(
                model,
                source,
                vocabulary,
                tokens=tokens,
                remember=config.remember_teacher,
                clock=clock,
            )

        def step(module: nn.Module, batch: Inputs, ids: Sequence[str]) -> tuple[Tensor, Tensor]:
            signal = None
            if teacher is not None:
                with clock("teacher"):
                    signal = teacher.signal(**batch, ids=ids)
            device = self.accelerator.device
            of_tokens = None if weights is None else weights.of(ids, device)
            read = {} if sources is None else {"sources": padded_sources(sources, ids, device)}
            return module(**batch, teacher=signal, weights=of_tokens, **read)

        module = self._module(student.model, vocabulary)
        dev = None if config.dev is None else self._dev_slice(config.dev, student, model, module)
        task = TrainingTask(
            config.name,
            module,
            step,
            loss.names,
            self._text(student, samples),
            self.target.tokenizer.pad_token_id or 0,
            measure=dev.measure if dev else None,
            measure_every=config.dev.every if config.dev else 1,
            look_ahead=look_ahead_of(source),
            deciding="expected_acceptance",
            flops=None
            if config.parallel is not None or self.target.has_encoder or self._shared is not None
            else distill_flops(
                student.model,
                model,
                # A remembered pass is not done again.
                runs_target=teacher is not None and cache is None and not config.remember_teacher,
                reads_logits=teacher is not None and not isinstance(cache, CachedTeacher),
            ),
        )
        return self.make_trainer(task, config.loop, config.optimizer, clock)

    def _live_features(
        self, model: PreTrainedModel, clock: Clock, sources: Mapping[str, Sequence[int]] | None
    ) -> LiveWindow | LiveFeatures | None:
        """The live teacher's hidden states, if it runs over the next batches together, or reads
        sources too. sources: what the encoder reads for each sample."""
        config = self.config
        if config.tokens_per_pass is None and sources is None:
            return None
        live = LiveFeatures(
            model,
            [FINAL],
            remember=config.remember_teacher,
            timed=partial(clock, "teacher"),
            sources=sources,
        )
        return self.in_windows(live, config.loop)

    def _module(self, model: PreTrainedModel, vocabulary: Tensor | None) -> Distillation:
        config, tokens = self.config, self.target.token_count
        sizes: Any = {"chunk": config.chunk_tokens, "vocabulary": vocabulary, "tokens": tokens}
        if self._shared is not None:
            return SharedVocabularyDistillation(
                model, config.weighted_loss, self._shared, chunk=config.chunk_tokens
            )
        mask_token = stored_mask_token(model.config)
        if config.parallel is None or mask_token is None:
            kind = EncoderDecoderDistillation if self.target.has_encoder else Distillation
            return kind(model, config.weighted_loss, **sizes)
        return ParallelDistillation(
            model, config.weighted_loss, config.parallel, mask_token, **sizes
        )

    def _text(self, student: Trainable, samples: Sequence[Sample]) -> Text:
        if self.config.on_policy is None:
            return FixedText(samples)
        return OnPolicyText(
            self.config.on_policy,
            student,
            self.target,
            self.corpus,
            self.corpus.answerable("train", self.config.name),
            samples,
            self.accelerator,
            self.directory / "rounds",
            max_length=self.config.max_length,
            seed=self.config.loop.seed,
        )

    def _dev_slice(
        self,
        config: DevConfig,
        student: Trainable,
        model: PreTrainedModel,
        module: Distillation,
    ) -> DevSlice:
        """model: the target's, as a teacher. module: computes the figures."""
        # All ranks must run a sharded target together, so a rank must not skip it by remembering.
        remember = not is_sharded(model)
        sources: dict[str, Sequence[int]] | None = {} if self.target.has_encoder else None
        if sources is not None:
            states = LiveFeatures(model, [FINAL], remember=remember, sources=sources)
            teacher: LiveTeacher = StatesTeacher(split_model(model), states)
        else:
            teacher = LiveTeacher(split_model(model), remember=remember)

        def sums(module: nn.Module, batch: Inputs, ids: Sequence[str]) -> Tensor:
            signal, device = teacher.signal(**batch, ids=ids), self.accelerator.device
            read = {} if sources is None else {"sources": padded_sources(sources, ids, device)}
            return module(**batch, agreement_with=signal, **read)[1]

        def make_drafter(weights: dict[str, Tensor]) -> tuple[Target, Drafter]:
            target = self.target
            drafter, vocabulary = student.plain(weights)
            drafter.to(target.device, target.dtype)
            ids = None if vocabulary is None else vocabulary.ids.to(target.device)
            if self._shared is not None:
                tokenizer = self._shared.tokenizer
                return target, SharedVocabularyDrafter.of_models(drafter, tokenizer, target, ids)
            kind = SmallLMDrafter if self.config.parallel is None else ParallelLMDrafter
            return target, kind.of_target(drafter, target, ids)

        judging = Judging(sums, module.figures, "student.", make_drafter)
        dev = DevSlice(
            config, judging, self.target, self.corpus, self.accelerator, stage=self.config.name
        )
        if sources is not None:
            require_sources_fit(self, student.model, dev.samples)
            sources |= {s.id: s.source for s in dev.samples}
        if self._shared is not None:
            require_room(self, self._shared, student.model, dev.samples)
        return dev

    def _save(
        self,
        name: str,
        model: PreTrainedModel,
        vocabulary: ReducedVocabulary | None,
        provenance: dict[str, Any],
    ) -> None:
        """Write a drafter directory with this name into the stage's directory."""

        def write(directory: Path) -> None:
            save_with_vocabulary(model, vocabulary, directory)
            tokenizer.save_pretrained(directory)

        path = self.directory / name
        tokenizer = self.target.tokenizer
        kind = "small_lm" if self.config.parallel is None else "pard"
        if self._shared is not None:
            tokenizer, kind = self._shared.tokenizer, "shared_vocabulary"
        save_drafter(path, kind, write, target=self.target, provenance=provenance)
