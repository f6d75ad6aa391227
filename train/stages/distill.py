"""`distill`: a small language model learns the target's distribution (DistillSpec, 2310.08461)."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.drafters import Drafter
from decode.drafters.directory import save_drafter
from decode.drafters.draft_vocabulary import ReducedVocabulary, reduce_output, save_with_vocabulary
from decode.drafters.pard import (
    ParallelLMDrafter,
    mark_parallel,
    stored_mask_token,
    unused_token,
)
from decode.drafters.small_lm import SmallLMDrafter
from decode.errors import UserError
from decode.target.cached_model import require_trees
from decode.target.hidden_states import FINAL
from decode.target.loading import Target
from decode.target.pretrained import is_sharded
from distill.distillation_loss import Distillation
from distill.parallel_distillation import (
    ParallelDistillation,
    require_full_attention,
)
from distill.teacher.feature_sources import LiveFeatures, bytes_per_token
from distill.teacher.teacher_signal import LiveTeacher, TeacherSource, split_model
from distill.teacher.top_k_cache import CachedTeacher
from distill.trainable_model import Trainable
from train.data.batches import Inputs
from train.data.chat import Sample
from train.data.training_text import FixedText, OnPolicyText, Text
from train.schema import StageConfig
from train.stage import STAGES, Outcome, StagePlan
from train.stages.distill_config import DistillConfig, check_settings, refuse
from train.text_stages import TrainingStage
from train.training.boosting import (
    TokenWeights,
    check_earlier_drafter,
    token_weights,
)
from train.training.dev_slice import DevConfig, DevSlice, Judging
from train.training.estimates import (
    activation_bytes,
    batch_share,
    forward_bytes,
    optimizer_bytes,
    planned_tokens,
    time_limit,
    training_disk_bytes,
)
from train.training.live_window import WINDOW_PASSES, LiveWindow, look_ahead_of
from train.training.meters.stage_flops import distill_flops
from train.training.open_caches import Cache, open_cache
from train.training.student_and_teacher import (
    checkpoint_layers,
    choose_trained,
    make_student,
    start_provenance,
    teacher_of,
    teaching_model,
)
from train.training.trainer import Clock, Trainer
from train.training.training_task import TrainingTask


@STAGES.register("distill")
class DistillStage(TrainingStage[DistillConfig]):
    """Trains a small LM on text, with the target as the teacher, and writes it to `drafter/`."""

    Config = DistillConfig

    @classmethod
    def check(cls, config: DistillConfig, earlier: Sequence[StageConfig]) -> None:
        super().check(config, earlier)
        check_settings(config, earlier)

    @classmethod
    def needs_complete_target(cls, config: DistillConfig) -> str | None:
        used = {
            "shard_teacher": config.shard_teacher,
            "remember_teacher": config.remember_teacher,
            # Ranks make different numbers of such passes, and shards need the same number.
            "tokens_per_pass": config.tokens_per_pass is not None,
            "dev.decode_prompts": config.dev is not None and config.dev.decode_prompts > 0,
        }
        return next((name for name, is_used in used.items() if is_used), None)

    def plan(self, plans: Mapping[str, StagePlan]) -> StagePlan:
        config = self.config
        for name in config.boost.names if config.boost else ():
            if name not in plans:
                check_earlier_drafter(Path(name), self.target)
        tokens = planned_tokens(self.planned_tokens(plans), config.loop)
        amount = f"{config.loop.epochs} epochs"
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
                start.memory_bytes,
                start.disk_bytes,
                max_seconds=time_limit(config.loop),
            )
        model, _ = make_student(config.drafter, self.target, self.earlier)
        if self._mask_token(model) is not None:
            require_full_attention(model)
            require_trees(model)  # training feeds masks and positions of the same kind
        choose_trained(model, embeddings=config.train_embeddings)
        student = Trainable(model, lora=config.lora).model
        trained = sum(p.numel() for p in student.parameters() if p.requires_grad)
        parameters = sum(p.numel() for p in student.parameters())
        ema = config.optimizer.ema is not None
        itemsize = 4 if self.accelerator.mixed_precision == "no" else 2
        # Its float32 weights; the target, which stays loaded; the logits of student and teacher for
        # one chunk.
        memory = 4 * parameters + optimizer_bytes(trained, average=ema) + self.target_bytes
        memory += 2 * 4 * config.chunk_tokens * self.target.vocab_size
        batch = batch_share(config.loop.tokens_per_batch, config.max_length, self.processes)
        memory += activation_bytes(
            model,
            model.config.get_text_config().num_hidden_layers,
            batch,
            itemsize,
            recompute=config.gradient_checkpointing,
        )
        if config.teacher == "live":
            pass_tokens = config.tokens_per_pass or batch
            states = bytes_per_token(self.target, [FINAL])
            memory += forward_bytes(self.target.model, pass_tokens)
            if config.tokens_per_pass is not None:
                memory += states * max(WINDOW_PASSES * pass_tokens, batch)
            if config.remember_teacher:
                memory += states * self.planned_text_tokens(plans)
        return StagePlan(
            f"{type(model).__name__} of {student.num_parameters() / 1e6:.1f}M parameters; "
            f"{config.losses_in_words}; {amount}",
            trained_parameters=trained,
            tokens=tokens,
            memory_bytes=memory,
            disk_bytes=training_disk_bytes(parameters, trained, average=ema, loop=config.loop),
            max_seconds=time_limit(config.loop),
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
        self._require_unused(stored_mask_token(student.model.config), samples)
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
        with self.reporter.bar("earlier drafters", len(paths) * len(samples)) as bar:
            weights = token_weights(
                config.boost,
                paths,
                samples,
                self.accelerator.device,
                tokens=self.target.token_count,
                tokens_per_batch=max(
                    1, config.loop.tokens_per_batch // self.accelerator.num_processes
                ),
                chunk=config.chunk_tokens,
                progress=bar.update,
            )
        self.reporter.say(f"  the earlier drafters miss {weights.missed:.1%} of the text's tokens")
        return weights

    def _prepare(
        self, samples: Sequence[Sample], cache: Cache | None
    ) -> tuple[Trainable, Tensor | None, dict[str, float]]:
        """The student on the accelerator's device; the ids of its draft vocabulary there, None for
        all tokens; and the vocabulary's coverage of the text, if it was chosen here. Saves a new
        student as `start/`."""
        config, device = self.config, self.accelerator.device
        # Random weights and adapters must not depend on what ran before this stage.
        torch.manual_seed(config.loop.seed)
        model, vocabulary, coverage = self._student(samples, cache)
        choose_trained(model, embeddings=config.train_embeddings)
        student = Trainable(model, vocabulary, config.lora)
        if self.accelerator.is_main_process and config.drafter.stage is None:
            self._save("start", *student.plain({}), {"stage": config.name, "steps": 0})
        if config.gradient_checkpointing:
            checkpoint_layers(model)
        model.to(device)
        return student, None if vocabulary is None else vocabulary.ids.to(device), coverage

    def _student(
        self, samples: Sequence[Sample], cache: Cache | None
    ) -> tuple[PreTrainedModel, ReducedVocabulary | None, dict[str, float]]:
        """The model to train, on the CPU; its draft vocabulary; and the vocabulary's coverage of
        the text, if it was chosen here."""
        config = self.config
        model, vocabulary = make_student(config.drafter, self.target, self.earlier)
        mask_token = self._mask_token(model)
        if mask_token is not None:
            mark_parallel(model.config, mask_token)
        if config.draft_vocabulary is not None:
            if vocabulary is not None:
                refuse(config, draft_vocabulary="the drafter's start already has one")
            ids, coverage = self.frequent_tokens(samples, config.draft_vocabulary)
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

    def _mask_token(self, model: PreTrainedModel) -> int | None:
        """The mask token of the drafter that starts as `model`. None: it drafts one token after the
        other. Raises UserError for a token in use, and for a parallel drafter without `parallel`.
        """
        config, stored = self.config, stored_mask_token(model.config)
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
            return unused_token(config.parallel.mask_token, self.target, rows)
        except UserError as error:
            raise UserError(f"stage {config.name}: parallel: {error}") from error

    def _require_unused(self, mask_token: int | None, samples: Sequence[Sample]) -> None:
        for sample in samples:
            if mask_token is not None and mask_token in sample.tokens:
                name = self.target.tokenizer.convert_ids_to_tokens(mask_token)
                raise UserError(
                    f"stage {self.config.name}: the mask token {mask_token} ({name!r}) is in use: "
                    f"the sample {sample.id} contains it; set parallel.mask_token to an id that "
                    "no text contains"
                )

    def _trainer(
        self,
        student: Trainable,
        vocabulary: Tensor | None,
        samples: Sequence[Sample],
        model: PreTrainedModel,
        cache: Cache | None,
        weights: TokenWeights | None,
    ) -> Trainer:
        """model: the target's, as a teacher. weights: of the tokens in the loss."""
        config, loss = self.config, self.config.weighted_loss
        tokens = self.target.token_count
        clock = Clock(self.accelerator.device)
        teacher: TeacherSource | None = None
        source: LiveWindow | Cache | None = None
        if loss.needs_teacher:
            source = cache or self._window(model, clock)
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
            of_tokens = None if weights is None else weights.of(ids, self.accelerator.device)
            return module(**batch, teacher=signal, weights=of_tokens)

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
            look_ahead=None if source is None else look_ahead_of(source),
            deciding="expected_acceptance",
            flops=None
            if config.parallel is not None
            else distill_flops(
                student.model,
                model,
                # A remembered pass is not done again.
                runs_target=teacher is not None and cache is None and not config.remember_teacher,
                reads_logits=teacher is not None and not isinstance(cache, CachedTeacher),
            ),
        )
        return self.make_trainer(task, config.loop, config.optimizer, clock)

    def _window(self, model: PreTrainedModel, clock: Clock) -> LiveWindow | None:
        """The live teacher's hidden states for the next batches, if it runs over them together."""
        config = self.config
        if config.tokens_per_pass is None:
            return None
        live = LiveFeatures(
            model, [FINAL], remember=config.remember_teacher, timed=partial(clock, "teacher")
        )
        return LiveWindow(
            live,
            config.loop,
            self.accelerator,
            tokens_per_pass=config.tokens_per_pass,
            pad_id=self.target.tokenizer.pad_token_id or 0,
        )

    def _module(self, model: PreTrainedModel, vocabulary: Tensor | None) -> Distillation:
        config, tokens = self.config, self.target.token_count
        sizes: Any = {"chunk": config.chunk_tokens, "vocabulary": vocabulary, "tokens": tokens}
        mask_token = stored_mask_token(model.config)
        if config.parallel is None or mask_token is None:
            return Distillation(model, config.weighted_loss, **sizes)
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
        teacher = LiveTeacher(split_model(model), remember=not is_sharded(model))

        def sums(module: nn.Module, batch: Inputs, ids: Sequence[str]) -> Tensor:
            signal = teacher.signal(**batch, ids=ids)
            return module(**batch, agreement_with=signal)[1]

        def make_drafter(weights: dict[str, Tensor]) -> tuple[Target, Drafter]:
            target = self.target
            drafter, vocabulary = student.plain(weights)
            drafter.to(target.device, target.dtype)
            ids = None if vocabulary is None else vocabulary.ids.to(target.device)
            kind = SmallLMDrafter if self.config.parallel is None else ParallelLMDrafter
            return target, kind.of_target(drafter, target, ids)

        judging = Judging(sums, module.figures, "student.", make_drafter)
        return DevSlice(
            config, judging, self.target, self.corpus, self.accelerator, stage=self.config.name
        )

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
            self.target.tokenizer.save_pretrained(directory)

        path = self.directory / name
        kind = "small_lm" if self.config.parallel is None else "pard"
        save_drafter(path, kind, write, target=self.target, provenance=provenance)
