"""`distill`: a small language model learns the target's distribution (DistillSpec, 2310.08461)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from decode.drafters import Drafter
from decode.model.hidden_states import FINAL
from decode.model.loading import Target
from distill.adapter_directory import save_adapter
from distill.distillation_loss import Distillation
from distill.flops import TextFlops
from distill.students import Student, make_student, student_kind
from distill.students.student_start import checkpoint_layers, choose_trained, start_provenance
from distill.teacher.feature_sources import LiveFeatures
from distill.teacher.linear_logits import require_linear_logits
from distill.teacher.live_teacher import LiveTeacher, TeacherSource
from distill.teacher.top_k_cache import CachedTeacher
from distill.trainable_model import Trainable, linear_sizes
from train.base.stage import STAGES, StageMemory, StagePlan, StageResult
from train.data.batches import Inputs
from train.data.chat_tokens import Sample
from train.data.training_text import FixedText, OnPolicyText, Text
from train.loop import parallel
from train.loop.dev_slice import DevJudging, DevSlice, require_dev_text
from train.loop.estimates import (
    optimizer_bytes,
    planned_tokens,
    steps_in_words,
    time_limit,
    training_disk_bytes,
)
from train.loop.live_window import LiveWindow, look_ahead_of
from train.loop.meters.stage_flops import distill_flops
from train.loop.open_caches import Cache, open_cache
from train.loop.teachers import (
    dev_teacher,
    padded,
    step_of,
)
from train.loop.trainer import Trainer, TrainingClock
from train.loop.training_task import TrainingTask
from train.settings.distill_config import DistillConfig
from train.settings.training import DevConfig
from train.stages.text_stages import TrainingStage
from train.stages.training_memory import distill_memory


@STAGES.register("distill")
class DistillStage(TrainingStage[DistillConfig]):
    """Trains a small LM on text, with the target as the teacher, and writes it to `drafter/`."""

    with_encoder = True

    def plan(self, plans: Mapping[str, StagePlan]) -> StagePlan:
        config = self.config
        student_kind(config, encoder=self.target.has_encoder)  # refuses settings
        if config.dev is not None:
            require_dev_text(config.dev, self.corpus, stage=config.name)
        if config.draft_vocabulary is not None or (
            config.needs_teacher and config.teacher == "live"
        ):
            require_linear_logits(self.target.model)
        tokens = planned_tokens(self.planned_tokens(plans), config.loop)
        steps = steps_in_words(tokens, config.loop, config.optimizer)
        amount = f"{config.loop.epochs} epochs, {steps}"
        if config.on_policy is not None:
            tokens = (config.loop.max_steps or 0) * config.loop.tokens_per_batch
            amount = f"{config.loop.max_steps} steps, λ = {config.on_policy.fraction:g}"
        amount += self.idle_in_words(config.loop)
        ema = config.optimizer.ema is not None
        needs_teacher = config.needs_teacher
        runs_target = needs_teacher and config.teacher == "live"
        if config.drafter.stage is not None:
            start = plans[config.drafter.stage]
            what = f"continues to train the drafter of {config.drafter.stage}"
            trained, memory = start.trained_parameters, start.memory
            if config.lora is not None and start.linear_sizes:
                trained = config.lora.parameters(start.linear_sizes)
                memory = replace(memory, optimizer=optimizer_bytes(trained, average=ema))
                memory += StageMemory(weights=4 * trained)
            return StagePlan(
                f"{what}; {config.losses_in_words}; {amount}",
                trained,
                tokens,
                memory,
                start.disk_bytes,
                max_seconds=time_limit(config.loop),
                drafters=1,
                runs_target=runs_target,
                training_flops=start.training_flops,
                linear_sizes=start.linear_sizes,
            )
        student = make_student(config, self.target, self.earlier)
        student.check()
        choose_trained(student.model, embeddings=config.train_embeddings)
        sizes = linear_sizes(student.model)
        weights = list(Trainable(student.model, lora=config.lora).model.parameters())
        parameters = sum(p.numel() for p in weights)
        trained = sum(p.numel() for p in weights if p.requires_grad)
        memory = distill_memory(
            config,
            student,
            target_bytes=self.target_bytes,
            parameters=parameters,
            trained=trained,
            processes=self.processes,
            itemsize=self.product_bytes,
        )
        flops = self._flops(student, runs_target=False, reads_logits=needs_teacher)
        return StagePlan(
            f"{student.in_words}; {config.losses_in_words}; {amount}",
            trained_parameters=trained,
            tokens=tokens,
            memory=memory,
            disk_bytes=training_disk_bytes(parameters, trained, average=ema, loop=config.loop),
            max_seconds=time_limit(config.loop),
            drafters=2,
            runs_target=runs_target,
            training_flops=flops.per_token + flops.per_prediction if flops else 0.0,
            linear_sizes=sizes,
        )

    def run(self) -> StageResult:
        config = self.config
        samples, counts = self.fitting_samples()
        cache = None
        if config.teacher != "live":
            cache = open_cache(
                self.cache_directory(config.teacher), self.target, samples, self.accelerator
            )
        student, coverage = self._prepare(samples, cache)
        parameters = student.model.num_parameters()
        trained = Trainable(student.model, student.vocabulary, config.lora)
        self._save_start(student, trained)
        if config.gradient_checkpointing:
            checkpoint_layers(student.model)
        parallel.place(self.accelerator, student.model)
        trainer = self._trainer(student, trained, samples, cache)
        progress = trainer.fit()
        weights = trainer.drafter_weights("student.")
        if self.accelerator.is_main_process:
            start = start_provenance(config.drafter, self.earlier)
            provenance = self.provenance(progress) | {"start": start}
            path = self.directory / "drafter"
            if config.lora is None or config.lora.merge:
                student.save(path, *trained.merged_model(weights), provenance, config.weights)
            else:
                target, base = self.target, self._base_directory()
                save_adapter(path, trained, weights, base, target=target, provenance=provenance)
        ids = student.target_ids
        summary = self.summary(trainer, counts, parameters)
        summary |= {"draft_vocabulary": None if ids is None else len(ids), **coverage}
        self.accelerator.free_memory()
        return StageResult(self.directory / "drafter", summary, work=trainer.work)

    def _prepare(
        self, samples: Sequence[Sample], cache: Cache | None
    ) -> tuple[Student, dict[str, float]]:
        """The student on the CPU, and its vocabulary's coverage of the text, if it was chosen
        here."""
        config = self.config
        # Random weights and adapters must not depend on what ran before this stage.
        torch.manual_seed(config.loop.seed)
        student = make_student(config, self.target, self.earlier)
        covered = student.prepare(samples, cache if isinstance(cache, CachedTeacher) else None)
        coverage = {}
        if covered is not None and student.target_ids is not None:
            what = student.vocabulary_in_words
            coverage = self.coverage(samples, student.target_ids, covered, what)
        choose_trained(student.model, embeddings=config.train_embeddings)
        return student, coverage

    def _base_directory(self) -> Path:
        """The drafter that the training began with."""
        stage = self.config.drafter.stage
        return self.directory / "start" if stage is None else self.earlier[stage] / "drafter"

    def _save_start(self, student: Student, trained: Trainable) -> None:
        """Save a new student as `start/`."""
        if self.accelerator.is_main_process and self.config.drafter.stage is None:
            provenance = {"stage": self.config.name, "steps": 0}
            student.save(
                self.directory / "start", *trained.merged_model(trained.weights()), provenance
            )

    def _trainer(
        self,
        student: Student,
        trained: Trainable,
        samples: Sequence[Sample],
        cache: Cache | None,
    ) -> Trainer:
        config, loss, model = self.config, self.config.weighted_loss, self.target.model
        tokens, device = self.target.token_count, self.accelerator.device
        clock = TrainingClock(device)
        ids = student.target_ids
        vocabulary = None if ids is None else ids.to(device)
        teacher: TeacherSource | None = None
        source: LiveWindow | LiveFeatures | Cache | None = None
        sources = student.read(samples)
        if loss.needs_teacher:
            source = cache or self.live_states([FINAL], config.loop, clock, sources)
            timed = partial(clock, "teacher")
            teacher = (
                source
                if isinstance(source, CachedTeacher)
                else LiveTeacher(model, source, vocabulary=vocabulary, tokens=tokens, timed=timed)
            )

        module = student.module(loss, vocabulary, config.chunk_tokens)
        dev = None
        if config.dev is not None:
            dev = self._dev_slice(config.dev, student, trained, module)
        task = TrainingTask(
            config.name,
            module,
            step_of(teacher, sources, clock),
            loss.names,
            self._text(trained, samples),
            self.target.tokenizer.pad_token_id or 0,
            measure=dev.measure if dev else None,
            measure_every=config.dev.every if config.dev else 1,
            look_ahead=look_ahead_of(source),
            deciding="expected_acceptance",
            flops=self._flops(
                student,
                runs_target=teacher is not None and cache is None,
                reads_logits=teacher is not None and not isinstance(cache, CachedTeacher),
            ),
        )
        return self.make_trainer(task, config.loop, config.optimizer, clock)

    def _flops(
        self, student: Student, *, runs_target: bool, reads_logits: bool
    ) -> TextFlops | None:
        """Of a training step. None: not known."""
        if not student.has_flops:
            return None
        return distill_flops(
            student.model, self.target.model, runs_target=runs_target, reads_logits=reads_logits
        )

    def _text(self, trained: Trainable, samples: Sequence[Sample]) -> Text:
        if self.config.on_policy is None:
            return FixedText(samples)
        return OnPolicyText(
            self.config.on_policy,
            trained,
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
        student: Student,
        trained: Trainable,
        module: Distillation,
    ) -> DevSlice:
        """module: computes the figures."""

        def sums(module: nn.Module, batch: Inputs, ids: Sequence[str]) -> Tensor:
            signal, device = teacher.signal(**batch, ids=ids), self.accelerator.device
            read = padded(sources, ids, device)
            return module(**batch, agreement_with=signal, **read)[1]

        def make_drafter(weights: dict[str, Tensor]) -> tuple[Target, Drafter]:
            return self.target, student.drafter(trained, weights)

        judging = DevJudging(sums, module.figures, "student.", make_drafter)
        dev = DevSlice(
            config, judging, self.target, self.corpus, self.accelerator, stage=self.config.name
        )
        sources = student.read(dev.samples)
        teacher = dev_teacher(self.target.model, sources)
        return dev
