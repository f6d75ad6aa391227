"""`distill`: a small language model learns the target's distribution (DistillSpec, 2310.08461)."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.fingerprint import fingerprint, require_same_vocabulary
from decode.store import describe_drafter, save_drafter
from decode.target import load_model_and_tokenizer
from decode.vocabulary import (
    ReducedVocabulary,
    load_vocabulary,
    reduce_output,
    save_with_vocabulary,
)
from distill.losses import Terms
from distill.module import Distillation
from distill.output import split_model
from distill.student import student_from_config, student_from_layers
from distill.teacher import LiveTeacher
from distill.vocabulary import most_frequent
from train import engines
from train.data.batches import Batch, fit
from train.data.chat import Sample, to_sample
from train.schema import StageConfig, Strict, closest_stage
from train.stages import STAGES, Outcome, Plan, Stage, StageContext
from train.stages.generate import read_answers
from train.trainer import LoopConfig, OptimizerConfig, Trainer, describe


class StudentConfig(Strict):
    """Where the drafter starts; exactly one of these.

    layers: a subset of the target's layers. model: an existing smaller model of the same
    vocabulary (hub id, directory, GGUF file). config: changes to the target's config, for random
    weights. stage: the drafter of an earlier distill stage.
    """

    layers: list[int] | None = None
    model: str | None = None
    config: dict[str, Any] | None = None
    stage: str | None = None

    @model_validator(mode="after")
    def _one(self) -> "StudentConfig":
        given = [name for name, value in self if value is not None]
        if len(given) != 1:
            raise ValueError(
                f"found {', '.join(given) or 'nothing'}; expected exactly one of layers, model, "
                "config, stage"
            )
        return self


class DistillConfig(StageConfig):
    """text: a generate stage's name, or several, or `data` for the responses in the training data.

    losses: {name: weight}. train_embeddings: off, the token embeddings and the output layer stay
    as they are at the start. remember_teacher: keep the target's hidden states of the text in
    memory after their first use. draft_vocabulary: draft only the so many most frequent tokens of
    the text; None: all, or those of the stage it goes on from. chunk_tokens: how many tokens'
    logits exist at a time.
    """

    kind: Literal["distill"] = "distill"
    text: str | list[str] = "data"
    drafter: StudentConfig
    losses: dict[str, float] = Field(default_factory=lambda: {"forward_kl": 1.0})
    train_embeddings: bool = True
    remember_teacher: bool = False
    draft_vocabulary: int | None = Field(None, ge=1)
    max_length: int = Field(1024, ge=2)
    on_long: Literal["truncate", "drop"] = "truncate"
    chunk_tokens: int = Field(256, ge=1)
    loop: LoopConfig = LoopConfig()
    optimizer: OptimizerConfig = OptimizerConfig()

    @field_validator("losses", mode="before")
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        # Strict fields take no 1 for 1.0; people write both.
        if isinstance(value, dict):
            return {k: float(v) if type(v) is int else v for k, v in value.items()}
        return value


@STAGES.register("distill")
class DistillStage(Stage):
    """Trains a small LM on text with the target beside it, and writes it to `drafter/`."""

    Config = DistillConfig

    def check(self, earlier: Sequence[StageConfig]) -> None:
        settings: DistillConfig = self.config
        Terms(settings.losses)
        for name in self._texts():
            closest_stage(name, earlier, "generate")
        if settings.drafter.stage is not None:
            closest_stage(settings.drafter.stage, earlier, "distill")
            if settings.draft_vocabulary is not None:
                raise UserError(
                    f"stage {settings.name} goes on with the drafter of {settings.drafter.stage}, "
                    "whose draft vocabulary it keeps; leave draft_vocabulary out"
                )

    def plan(self, context: StageContext) -> Plan:
        settings: DistillConfig = self.config
        target = context.target.model
        # Of a stage's answers only the most that they can be is known.
        text = [context.plans[name].tokens for name in self._texts()]
        if settings.text == "data":
            text = [sum(sample.mask) for sample in self._samples(context)]
        tokens = sum(text) * settings.loop.epochs
        if settings.drafter.stage is not None:
            begun = context.plans[settings.drafter.stage]
            return Plan(
                f"goes on with the drafter of {settings.drafter.stage}; {_losses(settings)}; "
                f"{settings.loop.epochs} epochs",
                begun.trained_parameters,
                tokens,
                begun.memory_bytes,
            )
        student, _ = self._student(context)
        self._freeze(student)
        trained = sum(p.numel() for p in student.parameters() if p.requires_grad)
        vocabulary = target.config.get_text_config().vocab_size
        # float32 weights, gradients and AdamW's two moments; the target; a chunk's logits with
        # softmax and gradient, of student and teacher.
        weights = 4 * sum(p.numel() for p in student.parameters()) + 12 * trained
        teacher = sum(p.numel() * p.element_size() for p in target.parameters())
        chunk = 6 * 4 * settings.chunk_tokens * vocabulary
        return Plan(
            f"{type(student).__name__} of {student.num_parameters() / 1e6:.1f}M parameters; "
            f"{_losses(settings)}; {settings.loop.epochs} epochs",
            trained_parameters=trained,
            tokens=tokens,
            memory_bytes=weights + teacher + chunk,
        )

    def run(self, context: StageContext) -> Outcome:
        settings: DistillConfig = self.config
        terms = Terms(settings.losses)
        samples, counts = fit(self._samples(context), settings.max_length, settings.on_long)
        context.reporter.say(
            "  text: " + ", ".join(f"{n} {what}" for what, n in counts.items() if n)
        )
        student, vocabulary = self._student(context)
        coverage = None
        if settings.draft_vocabulary is not None:
            vocabulary, coverage = self._reduce(context, student, samples)
        self._freeze(student)
        # Engines may take the student apart. This copy stays whole, and is what is saved.
        whole, whole_vocabulary = copy.deepcopy((student, vocabulary))
        student.to(context.accelerator.device)
        ids = None if vocabulary is None else vocabulary.ids.to(context.accelerator.device)
        start = context.directory / "start"
        drafter = context.directory / "drafter"
        if context.accelerator.is_main_process and settings.drafter.stage is None:
            self._save(
                context, whole, whole_vocabulary, start, {"stage": settings.name, "steps": 0}
            )
        teacher = None
        if terms.needs_teacher:
            teacher = LiveTeacher(
                split_model(context.target.model),
                remember=settings.remember_teacher,
                vocabulary=ids,
            )

        def step(module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
            given = {name: batch[name] for name in ("input_ids", "attention_mask", "loss_mask")}
            signal = teacher.logits(**given, ids=batch["ids"]) if teacher else None
            loss, parts = module(**given, teacher=signal)
            return loss, parts

        tokenizer = context.target.tokenizer
        trainer = Trainer(
            context.accelerator,
            context.reporter,
            settings.name,
            Distillation(
                student,
                terms,
                chunk=settings.chunk_tokens,
                vocabulary=ids,
            ),
            step,
            list(settings.losses),
            samples,
            tokenizer.pad_token_id or 0,
            settings.loop,
            settings.optimizer,
            context.directory,
        )
        trained = trainer.fit()
        summary = {
            "training": describe(trained),
            "samples": counts,
            "padding_share": trainer.padding_share(),
            "parameters": whole.num_parameters(),
            "trained_parameters": sum(p.numel() for p in whole.parameters() if p.requires_grad),
            "losses": settings.losses,
            "draft_vocabulary": None if ids is None else len(ids),
            "draft_vocabulary_coverage": coverage,
        }
        weights = engines.gathered_weights(context.accelerator, trainer.module, "student.")
        whole.load_state_dict(weights, strict=False)
        if context.accelerator.is_main_process:
            self._save(
                context,
                whole,
                whole_vocabulary,
                drafter,
                {
                    "stage": settings.name,
                    "run": context.run_name,
                    "settings": settings.model_dump(mode="json"),
                    "steps": trained.step,
                    "tokens": trained.tokens,
                    "start": self._started_from(context),
                },
            )
        context.accelerator.free_memory()
        return Outcome(drafter, summary)

    def _samples(self, context: StageContext) -> list[Sample]:
        settings: DistillConfig = self.config
        tokenizer, system = context.target.tokenizer, context.system
        examples = context.examples["train"]
        if settings.text == "data":
            return [to_sample(example, tokenizer, system=system) for example in examples]
        by_id = {example.id: example for example in examples + context.examples.get("dev", [])}
        samples = []
        for stage in self._texts():
            for answer in read_answers(context.outcomes[stage]):
                sample = to_sample(by_id[answer["id"]], tokenizer, answer["tokens"], system)
                name = f"{sample.id}#{stage}-{answer['sample']}"
                samples.append(Sample(name, sample.tokens, sample.mask))
        return samples

    def _texts(self) -> list[str]:
        """The generate stages whose answers are the text; none for the data's own responses."""
        text = self.config.text
        return [] if text == "data" else [text] if isinstance(text, str) else text

    def _student(self, context: StageContext) -> tuple[PreTrainedModel, ReducedVocabulary | None]:
        """The model to train, float32, and the draft vocabulary it comes with."""
        settings: DistillConfig = self.config
        vocabulary = None
        start, target = settings.drafter, context.target
        if start.layers is not None:
            student = student_from_layers(target.model, start.layers)
        elif start.config is not None:
            torch.manual_seed(settings.loop.seed)
            student = student_from_config(target.model, start.config)
        else:
            spec = start.model or ""
            if start.stage is not None:
                spec = str(context.outcomes[start.stage] / "drafter")
                describe_drafter(Path(spec))
            loaded = load_model_and_tokenizer(spec, dtype="float32", device="cpu")
            own = fingerprint(loaded.tokenizer, loaded.model.config, loaded.model.generation_config)
            require_same_vocabulary(own, target.fingerprint, f"drafter {spec}")
            student = loaded.model
            vocabulary = load_vocabulary(Path(spec), student)
        return student, vocabulary

    def _reduce(
        self, context: StageContext, student: PreTrainedModel, samples: list[Sample]
    ) -> tuple[ReducedVocabulary, float]:
        settings: DistillConfig = self.config
        assert settings.draft_vocabulary is not None
        ids, coverage = most_frequent(
            (sample.tokens for sample in samples),
            settings.draft_vocabulary,
            context.target.vocab_size,
            always=context.target.eos_token_ids,
        )
        context.reporter.say(
            f"  draft vocabulary: {len(ids)} tokens cover {coverage:.2%} of the text"
        )
        return reduce_output(student, ids), coverage

    def _freeze(self, student: PreTrainedModel) -> None:
        student.requires_grad_(True)
        if not self.config.train_embeddings:
            student.get_input_embeddings().requires_grad_(False)
            student.get_output_embeddings().requires_grad_(False)

    def _started_from(self, context: StageContext) -> Any:
        start = self.config.drafter
        if start.stage is not None:
            directory = context.outcomes[start.stage] / "drafter"
            return describe_drafter(directory)["provenance"]
        return start.model_dump(exclude_none=True)

    def _save(
        self,
        context: StageContext,
        student: PreTrainedModel,
        vocabulary: ReducedVocabulary | None,
        path: Path,
        provenance: dict[str, Any],
    ) -> None:
        def write(directory: Path) -> None:
            save_with_vocabulary(student, vocabulary, directory)
            context.target.tokenizer.save_pretrained(directory)

        save_drafter(path, "small_lm", write, target=context.target, provenance=provenance)


def _losses(settings: DistillConfig) -> str:
    return " + ".join(f"{weight:g}·{name}" for name, weight in settings.losses.items())
