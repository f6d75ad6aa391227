"""`heads`: small modules on the frozen target learn to guess the tokens after its next one.

One stage for all kinds (Medusa 2401.10774, Blockwise 1811.03115, …): they differ in what they
compute, which is theirs (`heads.base`), and in nothing that a training does around it.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, SerializeAsAny, field_validator
from torch import Tensor, nn

from decode.drafters import DRAFTERS, Drafter
from decode.errors import UserError
from decode.measure_tree import measure_acceptance, probe
from decode.shapes.calibrated import grow_greedily
from decode.shapes.structure import Structure
from distill.losses import Terms
from distill.output import split_model
from distill.parts import text_sha256
from heads.base import HeadOptions, Heads
from heads.bigrams import Bigrams, lookup_top1
from heads.cache import CachedFeatures
from heads.features import FeatureSource, LiveFeatures
from heads.store import build_heads, make_ready, new_heads, save_heads
from heads.training import HeadTraining
from train.clock import Clock
from train.data.batches import Inputs
from train.data.chat import Sample, prompt_tokens
from train.data.read import spread
from train.dev import DevConfig, DevSlice, Judging
from train.optimizer import OptimizerConfig
from train.samples import TextConfig, check_text, fitting_samples, planned_tokens, stages_of
from train.schema import StageConfig, Strict, closest_stage
from train.stage import STAGES, Outcome, Plan, Stage, StageContext
from train.student import frequent_tokens
from train.text import FixedText
from train.trainer import LoopConfig, Task, Trainer, describe


class TreeConfig(Strict):
    """The tree that the drafter is stored with, calibrated on the dev split (Medusa, section
    2.3.3): of `nodes` nodes, from the acceptance of the `width` likeliest tokens of each head, over
    so many prompts (spread evenly over the split) and tokens of text."""

    nodes: int = Field(32, ge=1)
    width: int = Field(10, ge=1)
    prompts: int = Field(32, ge=1)
    max_new_tokens: int = Field(48, ge=2)


class HeadsConfig(TextConfig):
    """heads: their type and options, as {type: medusa, heads: 5}; see `heads`.

    losses: {name: weight}, between each head and the token it predicts; one that reads the teacher
    distils the target's distribution at the head's own position. draft_vocabulary: the so many most
    frequent tokens of the text only. features: live, or a feature_cache stage's name, or the
    directory of one. remember_features: keep live ones in memory after their first use. dev:
    figures on a dev slice; `gamma` there is at most the number of heads. tree: calibrate a tree and
    store it with the drafter; None: it drafts chains. chunk_tokens: how many tokens' logits exist
    at a time.
    """

    kind: Literal["heads"] = "heads"
    heads: SerializeAsAny[HeadOptions]
    losses: dict[str, Any] = {"cross_entropy": 1.0}
    teacher_temperature: float = 1.0
    drafter_temperature: float = 1.0
    draft_vocabulary: int | None = Field(None, ge=1)
    features: str = "live"
    remember_features: bool = False
    dev: DevConfig | None = None
    tree: TreeConfig | None = None
    chunk_tokens: int = Field(256, ge=1)
    loop: LoopConfig = LoopConfig()
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3)

    @field_validator("heads", mode="before")
    @classmethod
    def _known_heads(cls, given: Any) -> HeadOptions:
        return HeadOptions.of(given)

    @property
    def terms(self) -> Terms:
        return Terms(
            self.losses,
            teacher_temperature=self.teacher_temperature,
            drafter_temperature=self.drafter_temperature,
        )


@STAGES.register("heads")
class HeadsStage(Stage):
    """Trains heads on text with the target beside it, and writes them to `drafter/`."""

    Config = HeadsConfig

    def check(self, earlier: Sequence[StageConfig]) -> None:
        settings: HeadsConfig = self.config
        terms = settings.terms
        if settings.teacher_temperature != 1 and not terms.needs_teacher:
            raise UserError(
                f"stage {settings.name}: no loss reads the teacher, so teacher_temperature would "
                "do nothing; leave it out"
            )
        check_text(settings, earlier)
        for name in stages_of(settings.dev.text) if settings.dev else []:
            closest_stage(name, earlier, "generate")
        if settings.features != "live":
            if not Path(settings.features).is_dir():
                closest_stage(settings.features, earlier, "feature_cache")
            if settings.remember_features:
                raise UserError(
                    f"stage {settings.name}: remember_features cannot be set here: there is no "
                    "live target to remember; leave it out"
                )

    def plan(self, context: StageContext) -> Plan:
        settings: HeadsConfig = self.config
        target = context.target
        self._require_dev(context)
        heads = build_heads(settings.heads, target, self._planned_vocabulary(context), "meta")
        trained = sum(p.numel() for p in heads.parameters())
        # float32 weights, gradients and AdamW's two moments; the target; a chunk's logits of heads
        # and target.
        teacher = sum(p.numel() * p.element_size() for p in target.model.parameters())
        chunk = 2 * 4 * settings.chunk_tokens * heads.rows
        options = settings.heads.model_dump(exclude={"type"})
        return Plan(
            f"{settings.heads.type} ({', '.join(f'{k}={v}' for k, v in options.items())}); "
            f"{settings.loop.epochs} epochs",
            trained_parameters=trained,
            tokens=planned_tokens(context, settings) * settings.loop.epochs,
            memory_bytes=16 * trained + teacher + chunk,
        )

    def run(self, context: StageContext) -> Outcome:
        settings: HeadsConfig = self.config
        accelerator, target = context.accelerator, context.target
        device = accelerator.device
        self._require_dev(context)
        split_model(target.model)  # refuses a target whose logits are more than a layer away
        samples, counts = fitting_samples(context, settings)
        vocabulary: Tensor | None = None
        coverage: dict[str, float] = {}
        if settings.draft_vocabulary is not None:
            vocabulary, coverage = frequent_tokens(context, samples, settings.draft_vocabulary)
        # Random weights, and the draws of sub-losses, are the stage's own, whatever ran before it.
        torch.manual_seed(settings.loop.seed)
        heads = new_heads(settings.heads, target, vocabulary)
        # Engines may take the module apart; this copy stays whole, on the CPU.
        whole = copy.deepcopy(heads)
        heads.to(device)
        if vocabulary is not None:
            heads.vocabulary = vocabulary.to(device)
        # Without autocast the products are float32, and so must be what is borrowed.
        heads.borrow(target.model, torch.float32 if accelerator.mixed_precision == "no" else None)
        clock = Clock(device)
        module = HeadTraining(heads, settings.terms, target.model, chunk=settings.chunk_tokens)
        source = self._source(context, module.taps, samples, clock)

        def step(module: nn.Module, given: Inputs, names: Sequence[str]) -> tuple[Tensor, Tensor]:
            # Of torch's random state, which is the same on all ranks and part of a checkpoint.
            return self._forward(
                module, source, given, names, heads.sub_losses(float(torch.rand(())))
            )

        dev = self._dev(context, module, whole)
        trainer = Trainer(
            accelerator,
            context.reporter,
            Task(
                settings.name,
                module,
                step,
                module.sums,
                FixedText(samples),
                target.tokenizer.pad_token_id or 0,
                measure=dev.measure if dev else None,
                measure_every=settings.dev.every if settings.dev else 1,
                figures=module.figures,
            ),
            settings.loop,
            settings.optimizer,
            context.directory,
            clock=clock,
            allow_changes=context.allow_changes,
        )
        trained = trainer.fit()
        with trainer.final_weights():
            whole.load_state_dict(trainer.weights("heads."))
        tree = None
        if accelerator.is_main_process:
            tree = self._tree(context, whole)
            provenance = {
                "stage": settings.name,
                "run": context.run_name,
                "settings": settings.model_dump(mode="json"),
                "steps": trained.step,
                "tokens": trained.tokens,
            }
            path = context.directory / "drafter"
            save_heads(path, whole, target=target, provenance=provenance, tree=tree)
        summary = {
            "training": describe(trained),
            "samples": counts,
            "padding_share": trainer.padding_share(),
            "parameters": sum(p.numel() for p in whole.parameters()),
            "trained_parameters": trainer.trained_parameters,
            "losses": settings.losses,
            "draft_vocabulary": None if vocabulary is None else len(vocabulary),
            "tree": tree and tree.paths,
            **coverage,
            **self._bigrams(context, samples, dev),
        }
        accelerator.free_memory()
        return Outcome(context.directory / "drafter", summary)

    def _source(
        self, context: StageContext, taps: Sequence[int], samples: Sequence[Sample], clock: Clock
    ) -> FeatureSource:
        settings: HeadsConfig = self.config
        if settings.features == "live":
            return LiveFeatures(
                context.target.model,
                taps,
                remember=settings.remember_features,
                timed=lambda: clock("teacher"),
            )
        directory = context.outcomes.get(settings.features, Path(settings.features))
        cache = CachedFeatures(directory, context.target, taps)
        cache.require([(s.id, text_sha256(s.tokens, s.mask)) for s in samples])
        return cache

    @staticmethod
    def _forward(
        module: nn.Module,
        source: FeatureSource,
        given: Inputs,
        names: Sequence[str],
        losses: Mapping[int, float],
    ) -> tuple[Tensor, Tensor]:
        features = source.features(given["input_ids"], given["attention_mask"], names)
        return module(given["input_ids"], given["loss_mask"], features, losses)

    def _planned_vocabulary(self, context: StageContext) -> Tensor | None:
        size = self.config.draft_vocabulary
        if size is None:
            return None
        if size >= context.target.vocab_size:
            raise UserError(
                f"a draft vocabulary of {size} tokens; expected fewer than the target's "
                f"{context.target.vocab_size}"
            )
        return torch.arange(size)

    def _require_dev(self, context: StageContext) -> None:
        settings: HeadsConfig = self.config
        if settings.tree is not None and "dev" not in context.examples:
            raise UserError(
                f"stage {settings.name} calibrates a tree, but data has no dev split; give one, or "
                "leave tree out"
            )

    def _drafter(self, context: StageContext, whole: Heads) -> Drafter:
        """Of heads on the CPU, as it would be loaded."""
        target = context.target
        heads = copy.deepcopy(whole)
        make_ready(heads, target, target.dtype)
        kind: Any = DRAFTERS[self.config.heads.type]
        drafter: Drafter = kind(heads, target.vocab_size)
        return drafter

    def _dev(self, context: StageContext, module: HeadTraining, whole: Heads) -> DevSlice | None:
        settings: HeadsConfig = self.config
        if settings.dev is None:
            return None
        source = LiveFeatures(context.target.model, module.taps, remember=True)
        losses = dict.fromkeys(range(1, whole.depth + 1), 1.0)
        names = module.sums

        def sums(prepared: nn.Module, given: Inputs, ids: Sequence[str]) -> Tensor:
            return self._forward(prepared, source, given, ids, losses)[1]

        def drafter(weights: dict[str, Tensor]) -> Drafter:
            whole.load_state_dict(weights)
            return self._drafter(context, whole)

        def figures(found: Tensor) -> dict[str, float]:
            return module.figures(dict(zip(names, found.tolist(), strict=True)))

        return DevSlice(
            settings.dev, context, settings.name, Judging(sums, figures, "heads.", drafter)
        )

    def _tree(self, context: StageContext, whole: Heads) -> Structure | None:
        settings = self.config.tree
        if settings is None:
            return None
        target = context.target
        context.reporter.say("  calibrating the tree on dev prompts")
        chosen = spread(context.examples["dev"], settings.prompts)
        prompts = [prompt_tokens(e, target.tokenizer, context.system) for e in chosen]
        found = measure_acceptance(
            target.model,
            self._drafter(context, whole),
            prompts,
            tree=probe(min(settings.width, whole.rows), whole.depth),
            max_new_tokens=settings.max_new_tokens,
            eos_token_ids=target.eos_token_ids,
        )
        if not found.hits[0].any():
            context.reporter.say("  no draft of the first head was right; it drafts chains")
            return None
        return grow_greedily(found.table(), settings.nodes)

    def _bigrams(
        self, context: StageContext, samples: Sequence[Sample], dev: DevSlice | None
    ) -> dict[str, float]:
        """How often a bigram table of the training text, and prompt lookup, guess the dev slice's
        tokens: what the first head must beat."""
        if dev is None:
            return {}
        table = Bigrams((s.tokens, s.mask) for s in samples)
        found = table.top1((s.tokens, s.mask) for s in dev.samples)
        looked_up = lookup_top1((s.tokens, s.mask) for s in dev.samples)
        context.reporter.say(
            f"  of the dev slice's tokens a bigram table guesses {found:.1%}, prompt lookup "
            f"{looked_up:.1%}"
        )
        return {"bigram_top1": found, "lookup_top1": looked_up}
