"""`distill`: a small language model learns the target's distribution (DistillSpec, 2310.08461)."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.drafters import Drafter
from decode.drafters.directory import save_drafter
from decode.drafters.draft_vocabulary import ReducedVocabulary, reduce_output, save_with_vocabulary
from decode.drafters.small_lm import SmallLMDrafter
from decode.errors import UserError
from decode.target.loading import Target
from distill.agreement import Agreement
from distill.lora import LoraConfig, Trainable
from distill.module import Distillation
from distill.teacher.hidden_state_cache import holds_features
from distill.teacher.live import LiveTeacher, TeacherSource
from distill.teacher.output_layer import split_model
from distill.teacher.top_k_cache import CachedTeacher
from train.data.batches import Inputs
from train.data.chat import Sample
from train.data.corpus import stages_of
from train.data.training_text import FixedText, OnPolicyConfig, OnPolicyText, Text
from train.online.learners import heads_stage
from train.schema import StageConfig, closest_stage
from train.stage import STAGES, Outcome, StageContext, StagePlan
from train.text_stages import (
    LossConfig,
    TrainedStage,
    check_text,
    describe,
    fitting_samples,
    planned_tokens,
)
from train.training.dev_slice import DevConfig, DevSlice, Judging
from train.training.optimizer import OptimizerConfig
from train.training.student_and_teacher import (
    DRAFTER_STAGES,
    Cache,
    StudentConfig,
    TargetModel,
    checkpoint_layers,
    choose_trained,
    frequent_tokens,
    make_student,
    open_cache,
    teacher_of,
)
from train.training.time_and_memory import Clock
from train.training.trainer import LoopConfig, Trainer, TrainingTask


class DistillConfig(LossConfig):
    """teacher: live, or the name or directory of a teacher_cache stage (the target's likeliest
    tokens) or of a feature_cache stage (its complete distribution).
    remember_teacher: keep the live target's hidden states of the text in memory after first use.
    shard_teacher: shard the live target over the ranks while this stage runs.
    on_policy: the drafter generates a part of the text itself. dev: figures on a dev slice.
    train_embeddings: if off, the token embeddings and the output layer keep their init weights.
    lora: train adapters instead of the weights.
    draft_vocabulary: draft only this many of the text's most frequent tokens. None: all tokens, or
    the vocabulary of the stage that this stage continues, or of the cache.
    chunk_tokens: the number of tokens whose logits are in memory at a time.
    """

    kind: Literal["distill"] = "distill"
    drafter: StudentConfig
    losses: dict[str, Any] = {"forward_kl": 1.0}
    teacher: str = "live"
    remember_teacher: bool = False
    shard_teacher: bool = False
    on_policy: OnPolicyConfig | None = None
    dev: DevConfig | None = None
    train_embeddings: bool = True
    lora: LoraConfig | None = None
    gradient_checkpointing: bool = False
    draft_vocabulary: int | None = Field(None, ge=1)
    chunk_tokens: int = Field(256, ge=1)
    loop: LoopConfig = LoopConfig()
    optimizer: OptimizerConfig = OptimizerConfig()


@STAGES.register("distill")
class DistillStage(TrainedStage):
    """Trains a small LM on text, with the target as the teacher, and writes it to `drafter/`."""

    Config = DistillConfig

    def check(self, earlier: Sequence[StageConfig]) -> None:
        settings: DistillConfig = self.config
        terms = settings.weighted_loss
        check_text(settings, earlier)
        if settings.dev is not None:
            for name in stages_of(settings.dev.text):
                closest_stage(name, earlier, "generate")
        if settings.drafter.stage is not None:
            closest_stage(settings.drafter.stage, earlier, *DRAFTER_STAGES)
            if heads_stage(settings.drafter.stage, earlier) is not None:
                raise UserError(
                    f"stage {settings.name} trains a small language model, and the drafter of "
                    f"{settings.drafter.stage} is heads on the target; name another stage"
                )
            self._refuse(
                draft_vocabulary=f"the drafter of {settings.drafter.stage} keeps its own",
            )
        if self._cached:
            if Path(settings.teacher).is_dir():
                states = holds_features(Path(settings.teacher))
            else:
                made_by = closest_stage(settings.teacher, earlier, "teacher_cache", "feature_cache")
                states = made_by.kind == "feature_cache"
            if not states:
                self._refuse(draft_vocabulary="the cache has its own")
            self._refuse(
                on_policy="the cache has no word on text that is still to be written",
                remember_teacher="there is no live target to remember",
                shard_teacher="there is no live target to shard",
            )
            if settings.teacher_temperature != 1 and not states:
                raise UserError(
                    f"stage {settings.name} learns from a cache, which has the temperature that "
                    "it was made at; set `temperature` of the teacher_cache stage instead of "
                    "teacher_temperature"
                )
        if settings.on_policy is not None:
            self._refuse(remember_teacher="the drafter's own text comes only once")
            if settings.loop.max_steps is None:
                raise UserError(
                    f"stage {settings.name} trains on text that is still to be written, so it has "
                    "no epochs; set loop.max_steps"
                )
            if not terms.needs_teacher or "cross_entropy" in settings.losses:
                raise UserError(
                    f"stage {settings.name}: cross_entropy on the drafter's own text would teach "
                    "it what it says already; use a divergence from the teacher"
                )
        if settings.shard_teacher:
            self._refuse(remember_teacher="ranks of a sharded target must all run it every time")
            if settings.dev is not None and settings.dev.decode_prompts:
                raise UserError(
                    f"stage {settings.name}: dev.decode_prompts needs the whole target on one "
                    "device; leave it out, or shard_teacher"
                )

    def _refuse(self, **reasons: str) -> None:
        """Raise UserError if any of these settings is set. reasons: {setting: reason}."""
        for key, reason in reasons.items():
            if getattr(self.config, key):
                raise UserError(
                    f"stage {self.config.name}: {key} cannot be set here: {reason}; leave it out"
                )

    @property
    def _cached(self) -> bool:
        return self.config.teacher != "live"

    def plan(self, context: StageContext) -> StagePlan:
        settings: DistillConfig = self.config
        target = context.target.model
        tokens = planned_tokens(context, settings) * settings.loop.epochs
        amount = f"{settings.loop.epochs} epochs"
        if settings.on_policy is not None:
            tokens = (settings.loop.max_steps or 0) * settings.loop.tokens_per_batch
            amount = f"{settings.loop.max_steps} steps, λ = {settings.on_policy.fraction:g}"
        if settings.drafter.stage is not None:
            begun = context.plans[settings.drafter.stage]
            what = f"goes on with the drafter of {settings.drafter.stage}"
            return StagePlan(
                f"{what}; {settings.losses_in_words}; {amount}",
                begun.trained_parameters,
                tokens,
                begun.memory_bytes,
            )
        model, _ = make_student(settings.drafter, context)
        choose_trained(model, embeddings=settings.train_embeddings)
        student = Trainable(model, lora=settings.lora).model
        trained = sum(p.numel() for p in student.parameters() if p.requires_grad)
        # float32 weights, gradients and AdamW's two moments; the target; the logits of student and
        # teacher for one chunk.
        weights = 4 * sum(p.numel() for p in student.parameters()) + 12 * trained
        teacher = sum(p.numel() * p.element_size() for p in target.parameters())
        chunk = 2 * 4 * settings.chunk_tokens * context.target.vocab_size
        return StagePlan(
            f"{type(model).__name__} of {student.num_parameters() / 1e6:.1f}M parameters; "
            f"{settings.losses_in_words}; {amount}",
            trained_parameters=trained,
            tokens=tokens,
            memory_bytes=weights + (0 if self._cached else teacher) + chunk,
        )

    def run(self, context: StageContext) -> Outcome:
        settings: DistillConfig = self.config
        samples, counts = fitting_samples(context, settings)
        cache = open_cache(settings.teacher, context, samples) if self._cached else None
        # Random weights and adapters must not depend on what ran before this stage.
        torch.manual_seed(settings.loop.seed)
        model, vocabulary, coverage = self._student(context, samples, cache)
        choose_trained(model, embeddings=settings.train_embeddings)
        student = Trainable(model, vocabulary, settings.lora)
        if context.accelerator.is_main_process and settings.drafter.stage is None:
            start = context.directory / "start"
            self._save(context, *student.plain({}), start, {"steps": 0})
        if settings.gradient_checkpointing:
            checkpoint_layers(model)
        device = context.accelerator.device
        model.to(device)
        ids = None if vocabulary is None else vocabulary.ids.to(device)
        tokens = context.target.token_count
        clock = Clock(device)
        with TargetModel(context, shard=settings.shard_teacher) as target:
            teacher: TeacherSource | None = None
            if settings.weighted_loss.needs_teacher:
                teacher = teacher_of(
                    target,
                    cache,
                    ids,
                    tokens=tokens,
                    remember=settings.remember_teacher,
                    clock=clock,
                )

            def step(
                module: nn.Module, given: Inputs, names: Sequence[str]
            ) -> tuple[Tensor, Tensor]:
                signal = None
                if teacher is not None:
                    with clock("teacher"):
                        signal = teacher.signal(**given, ids=names)
                loss, parts = module(**given, teacher=signal)
                return loss, parts

            dev = self._dev(context, student, target)
            trainer = Trainer(
                context.accelerator,
                context.reporter,
                TrainingTask(
                    settings.name,
                    Distillation(
                        model,
                        settings.weighted_loss,
                        chunk=settings.chunk_tokens,
                        vocabulary=ids,
                        tokens=tokens,
                    ),
                    step,
                    settings.weighted_loss.names,
                    self._text(context, student, samples),
                    context.target.tokenizer.pad_token_id or 0,
                    measure=dev.measure if dev else None,
                    measure_every=settings.dev.every if settings.dev else 1,
                ),
                settings.loop,
                settings.optimizer,
                context.directory,
                clock=clock,
                allow_changes=context.allow_changes,
            )
            trained = trainer.fit()
        with trainer.final_weights():
            final, vocabulary = student.plain(trainer.weights("student."))
        if context.accelerator.is_main_process:
            provenance = {
                "run": context.run_name,
                "settings": settings.model_dump(mode="json"),
                "steps": trained.step,
                "tokens": trained.tokens,
                "start": settings.drafter.provenance(context),
            }
            self._save(context, final, vocabulary, context.directory / "drafter", provenance)
        summary = {
            "training": describe(trained),
            "samples": counts,
            "padding_share": trainer.padding_share(),
            "parameters": final.num_parameters(),
            "trained_parameters": trainer.trained_parameters,
            "losses": settings.losses,
            "draft_vocabulary": None if ids is None else len(ids),
            **coverage,
        }
        context.accelerator.free_memory()
        return Outcome(context.directory / "drafter", summary)

    def _student(
        self,
        context: StageContext,
        samples: Sequence[Sample],
        cache: Cache | None,
    ) -> tuple[PreTrainedModel, ReducedVocabulary | None, dict[str, float]]:
        """The model to train, on the CPU; its draft vocabulary; and the vocabulary's coverage of
        the text, if it was chosen here."""
        settings: DistillConfig = self.config
        model, vocabulary = make_student(settings.drafter, context)
        if settings.draft_vocabulary is not None:
            if vocabulary is not None:
                self._refuse(draft_vocabulary="the model it starts from has one")
            ids, coverage = frequent_tokens(context, samples, settings.draft_vocabulary)
            return model, reduce_output(model, ids), coverage
        if isinstance(cache, CachedTeacher):
            wanted, own = cache.vocabulary, None if vocabulary is None else vocabulary.ids
            if own is None and wanted is not None:
                return model, reduce_output(model, wanted), {}
            if own is not None and (wanted is None or not torch.equal(own, wanted)):
                raise UserError(
                    f"the drafter's draft vocabulary of {len(own)} tokens is not that of the "
                    f"teacher cache {cache.directory} ("
                    f"{'the whole one' if wanted is None else f'{len(wanted)} tokens'}); make the "
                    "cache first and start the drafter from it"
                )
        return model, vocabulary, {}

    def _text(
        self,
        context: StageContext,
        student: Trainable,
        samples: Sequence[Sample],
    ) -> Text:
        settings: DistillConfig = self.config
        if settings.on_policy is None:
            return FixedText(samples)
        prompts = [e for e in context.examples["train"] if e.messages is not None]
        if not prompts:
            raise UserError(
                f"stage {settings.name}: the train split has no prompts for the drafter to answer, "
                "only text; give rows with prompt or messages"
            )
        return OnPolicyText(
            settings.on_policy, context, student, prompts, samples, settings.loop.seed
        )

    def _dev(
        self, context: StageContext, student: Trainable, target: PreTrainedModel
    ) -> DevSlice | None:
        settings = self.config.dev
        if settings is None:
            return None
        # All ranks must run a sharded target together, so no rank may remember results by itself.
        teacher = LiveTeacher(split_model(target), remember=not self.config.shard_teacher)

        def sums(module: nn.Module, given: Inputs, names: Sequence[str]) -> Tensor:
            signal = teacher.signal(**given, ids=names)
            return module(**given, agreement_with=signal)[1]

        def decoded(weights: dict[str, Tensor]) -> tuple[Target, Drafter]:
            model, vocabulary = student.plain(weights)
            model.to(context.target.device, context.target.dtype)
            ids = None if vocabulary is None else vocabulary.ids.to(context.target.device)
            return context.target, SmallLMDrafter.of_target(model, context.target, ids)

        judging = Judging(sums, lambda x: asdict(Agreement.from_sums(x)), "student.", decoded)
        return DevSlice(settings, context, self.config.name, judging)

    def _save(
        self,
        context: StageContext,
        model: PreTrainedModel,
        vocabulary: ReducedVocabulary | None,
        path: Path,
        provenance: dict[str, Any],
    ) -> None:
        def write(directory: Path) -> None:
            save_with_vocabulary(model, vocabulary, directory)
            context.target.tokenizer.save_pretrained(directory)

        provenance = {"stage": self.config.name} | provenance
        save_drafter(path, "small_lm", write, target=context.target, provenance=provenance)
