"""`heads`: small modules on the frozen target learn to predict the tokens after its next token.

One stage trains all kinds of heads (Medusa 2401.10774, Blockwise 1811.03115, …). The kinds differ
only in their computation (`heads.base`), not in the training around it.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, SerializeAsAny, field_validator
from torch import Tensor, nn

from decode.drafters import DRAFTERS, Drafter
from decode.drafters.directory import describe_drafter
from decode.errors import UserError
from decode.measure.calibrate_tree import TreeCalibration
from decode.target.loading import Target
from decode.trees.stored import store_tree
from distill.drift import Drift
from distill.teacher.live_hidden_states import FeatureSource, LiveFeatures
from distill.teacher.output_layer import split_model
from heads.base import HeadOptions, Heads
from heads.bigrams import Bigrams, lookup_top1
from heads.joint import JointTraining
from heads.store import build_heads, make_ready, new_heads, read_heads, save_heads
from heads.training import HeadTraining
from train.data.batches import Inputs
from train.data.chat import Sample
from train.data.corpus import stages_of
from train.data.training_text import FixedText
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
from train.training.backbone import Backbone, BackboneConfig
from train.training.dev_slice import DevConfig, DevSlice, Judging
from train.training.head_tree import TreeConfig, calibrated_tree, require_tree
from train.training.optimizer import OptimizerConfig
from train.training.student_and_teacher import frequent_tokens, open_features
from train.training.time_and_memory import Clock
from train.training.trainer import LoopConfig, Trainer, TrainingTask


class HeadsConfig(LossConfig):
    """heads: type and options, as {type: medusa, heads: 5}; see `heads`. start: an earlier heads
    stage on the same target; this stage continues to train its heads. backbone: train the target
    too and write the new target to `target/`; None: the target does not change.

    losses: {name: weight}, between each head and the token it predicts. A loss that reads the
    teacher distils the target's distribution of that same token.
    draft_vocabulary: draft only this many of the text's most frequent tokens. features: live, or
    the name or directory of a feature_cache stage. remember_features: keep live hidden states in
    memory after their first use. dev: figures on a dev slice; its `gamma` is at most the number of
    heads. tree: calibrate a tree after the drafter is written, and store it with the drafter. A
    target that cannot verify trees is refused before the training. None: the drafter drafts chains.
    chunk_tokens: the number of tokens whose logits are in memory at a time.
    """

    kind: Literal["heads"] = "heads"
    heads: SerializeAsAny[HeadOptions]
    start: str | None = None
    backbone: BackboneConfig | None = None
    losses: dict[str, Any] = {"cross_entropy": 1.0}
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


@STAGES.register("heads")
class HeadsStage(TrainedStage):
    """Trains heads on text and the target's hidden states, and writes them to `drafter/`."""

    Config = HeadsConfig

    def check(self, earlier: Sequence[StageConfig]) -> None:
        settings: HeadsConfig = self.config
        terms = settings.weighted_loss
        if settings.teacher_temperature != 1 and not terms.needs_teacher:
            raise UserError(
                f"stage {settings.name}: no loss reads the teacher, so teacher_temperature would "
                "do nothing; leave it out"
            )
        check_text(settings, earlier)
        for name in stages_of(settings.dev.text) if settings.dev else []:
            closest_stage(name, earlier, "generate")
        if settings.start is not None:
            self._check_start(settings.start, earlier)
        if settings.backbone is not None:
            self._check_backbone(settings.backbone, earlier)
        if settings.features != "live":
            if not Path(settings.features).is_dir():
                closest_stage(settings.features, earlier, "feature_cache")
            if settings.remember_features:
                raise UserError(
                    f"stage {settings.name}: remember_features cannot be set here: there is no "
                    "live target to remember; leave it out"
                )

    def _check_start(self, start: str, earlier: Sequence[StageConfig]) -> None:
        settings: HeadsConfig = self.config
        begun: Any = closest_stage(start, earlier, "heads")
        if begun.backbone is not None:
            raise UserError(
                f"stage {settings.name} starts from the heads of {start}, which belong to the new "
                f"target that {start} made; name a stage whose target stayed as it was, or start a "
                "run with that new target"
            )
        if begun.heads != settings.heads:
            raise UserError(
                f"stage {settings.name} goes on with the heads of {start}, which are "
                f"{begun.heads}, and names {settings.heads}; expected the same"
            )
        if settings.draft_vocabulary is not None:
            raise UserError(
                f"stage {settings.name}: draft_vocabulary cannot be set here: the heads of {start} "
                "keep their own; leave it out"
            )

    def _check_backbone(self, backbone: BackboneConfig, earlier: Sequence[StageConfig]) -> None:
        settings: HeadsConfig = self.config
        backbone.check(settings.name, earlier)
        if settings.features != "live" or settings.remember_features:
            key = "remember_features" if settings.remember_features else "features"
            raise UserError(
                f"stage {settings.name}: {key} cannot be set here: the target is trained, so its "
                "hidden states change with every step; leave it out"
            )

    def plan(self, context: StageContext) -> StagePlan:
        settings: HeadsConfig = self.config
        target = context.target
        heads = build_heads(settings.heads, target, self._planned_vocabulary(context), "meta")
        self._require_ready(context, heads)
        begun = None if settings.start is None else context.plans[settings.start]
        trained = sum(p.numel() for p in heads.parameters())
        trained = trained if begun is None else begun.trained_parameters
        # float32 weights, gradients and AdamW's two moments; the target; the logits of heads and
        # target for one chunk.
        teacher = sum(p.numel() * p.element_size() for p in target.model.parameters())
        memory = 16 * trained + teacher + 2 * 4 * settings.chunk_tokens * heads.rows
        options = settings.heads.model_dump(exclude={"type"})
        what = f"{settings.heads.type} ({', '.join(f'{k}={v}' for k, v in options.items())}); "
        if settings.backbone is not None:
            own = settings.backbone.trained_parameters(target)
            trained += own
            # The trained float32 copy of the target, and a second copy that is never sharded.
            memory += 12 * own + 2 * 4 * target.model.num_parameters()
            what += f"the target too ({'LoRA' if settings.backbone.lora else 'all weights'}); "
        return StagePlan(
            f"{what}{settings.loop.epochs} epochs",
            trained_parameters=trained,
            tokens=planned_tokens(context, settings) * settings.loop.epochs,
            memory_bytes=memory,
        )

    def run(self, context: StageContext) -> Outcome:
        settings: HeadsConfig = self.config
        accelerator, target = context.accelerator, context.target
        device = accelerator.device
        split_model(target.model)  # refuses a target whose logits need more than an output layer
        samples, counts = fitting_samples(context, settings)
        vocabulary: Tensor | None = None
        coverage: dict[str, float] = {}
        if settings.draft_vocabulary is not None:
            vocabulary, coverage = frequent_tokens(context, samples, settings.draft_vocabulary)
        # Random weights and drawn sub-losses must not depend on what ran before this stage.
        torch.manual_seed(settings.loop.seed)
        start: Any = None
        if settings.start is None:
            heads = new_heads(settings.heads, target, vocabulary)
        else:
            begun = context.outcomes[settings.start] / "drafter"
            start = describe_drafter(begun)["provenance"]
            heads = read_heads(begun, target)
            vocabulary = heads.vocabulary
        self._require_ready(context, heads)
        # Engines may shard the module. This copy stays complete, on the CPU.
        whole = copy.deepcopy(heads)
        heads.to(device)
        if vocabulary is not None:
            heads.vocabulary = vocabulary.to(device)
        # Without autocast, matrix products are float32, so the borrowed weights must be too.
        heads.borrow(target.model, torch.float32 if accelerator.mixed_precision == "no" else None)
        clock = Clock(device)
        training = HeadTraining(
            heads, settings.weighted_loss, target.model, chunk=settings.chunk_tokens
        )
        module: HeadTraining | JointTraining = training
        backbone: Backbone | None = None
        optimizer = settings.optimizer
        if settings.backbone is not None:
            backbone = Backbone(settings.backbone, context, settings.name, clock)
            module = backbone.join(training, settings.chunk_tokens)
            optimizer = settings.backbone.optimizer(optimizer)
        else:
            source = self._source(context, training.captured_layers, samples, clock)

        def step(module: nn.Module, given: Inputs, names: Sequence[str]) -> tuple[Tensor, Tensor]:
            # Draws from torch's random state, which checkpoints store. It is the same on all ranks
            # (except after draws for an adapter's dropout).
            losses = heads.loss_weights(float(torch.rand(())))
            if backbone is None:
                return self._forward(module, source, given, names, losses)
            # Never 0: self-distillation begins with a loss of 0, so the gradient would be only
            # rounding errors, and Adam takes full steps even for tiny gradients.
            weight = backbone.weight(heads, (trainer.at.step + 1) / trainer.total_steps)
            return backbone.forward(module, given, names, losses, weight)

        dev = self._dev(context, module, whole, backbone)
        trainer = Trainer(
            accelerator,
            context.reporter,
            TrainingTask(
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
            optimizer,
            context.directory,
            clock=clock,
            allow_changes=context.allow_changes,
        )
        trained = trainer.fit()
        with trainer.final_weights():
            weights = trainer.weights()
        whole.load_state_dict(_heads_in(weights, backbone))
        tree: TreeCalibration | None = None
        drift: Drift | None = None
        if accelerator.is_main_process:
            if backbone is not None:
                target, drift = backbone.save(weights, context.directory / "target")
            provenance = {
                "stage": settings.name,
                "run": context.run_name,
                "settings": settings.model_dump(mode="json"),
                "steps": trained.step,
                "tokens": trained.tokens,
                "start": start,
                "drift": drift and drift.to_dict(),
                "original": drift and context.target.name,
            }
            path = context.directory / "drafter"
            save_heads(path, whole, target=target, provenance=provenance)
            # After saving: trained heads must not be lost if the tree cannot be planned.
            tree = self._tree(context, target, whole, path)
        summary = {
            "training": describe(trained),
            "samples": counts,
            "padding_share": trainer.padding_share(),
            "parameters": sum(p.numel() for p in whole.parameters()),
            "trained_parameters": trainer.trained_parameters,
            "losses": settings.losses,
            "draft_vocabulary": None if vocabulary is None else len(vocabulary),
            "tree": tree and tree.to_dict() | {"paths": tree.structure.paths},
            "drift": drift and drift.to_dict(),
            **coverage,
            **self._bigrams(context, samples, dev),
        }
        accelerator.free_memory()
        moved = None if backbone is None else context.directory / "target"
        return Outcome(context.directory / "drafter", summary, moved)

    def _source(
        self,
        context: StageContext,
        captured_layers: Sequence[int],
        samples: Sequence[Sample],
        clock: Clock,
    ) -> FeatureSource:
        settings: HeadsConfig = self.config
        if settings.features == "live":
            return LiveFeatures(
                context.target.model,
                captured_layers,
                remember=settings.remember_features,
                timed=lambda: clock("teacher"),
            )
        return open_features(settings.features, context, samples, captured_layers)

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

    def _require_ready(self, context: StageContext, heads: Heads) -> None:
        """Raise UserError before the first step for reasons that would stop the stage later."""
        settings: HeadsConfig = self.config
        if settings.tree is not None:
            require_tree(settings.tree, context, settings.name, heads)
        if self.config.backbone is not None and heads.joint_weight is None:
            raise UserError(
                f"stage {self.config.name}: heads of type {self.config.heads.type} are for a "
                "target that stays as it is; leave backbone out"
            )

    def _tree(
        self, context: StageContext, target: Target, whole: Heads, path: Path
    ) -> TreeCalibration | None:
        """Calibrate the tree and store it with the drafter in `path`. None if it drafts chains."""
        settings: HeadsConfig = self.config
        if settings.tree is None:
            return None
        try:
            tree = calibrated_tree(
                settings.tree, context, target, self._drafter(target, whole), whole
            )
            if tree is not None:
                store_tree(path, tree.structure, tree.to_dict())
        except UserError as error:
            raise UserError(
                f"stage {settings.name}: no tree could be planned: {error} The drafter is trained "
                f"and in {path}; start the run again to plan its tree without training again"
            ) from error
        return tree

    def _drafter(self, target: Target, whole: Heads) -> Drafter:
        """The drafter made of `whole` (heads on the CPU), as if loaded from a directory."""
        heads = copy.deepcopy(whole)
        make_ready(heads, target, target.dtype)
        kind: Any = DRAFTERS[self.config.heads.type]
        drafter: Drafter = kind(heads, target.vocab_size)
        return drafter

    def _dev(
        self,
        context: StageContext,
        module: HeadTraining | JointTraining,
        whole: Heads,
        backbone: Backbone | None,
    ) -> DevSlice | None:
        settings: HeadsConfig = self.config
        if settings.dev is None:
            return None
        losses = dict.fromkeys(range(1, whole.depth + 1), 1.0)
        names = module.sums
        if isinstance(module, HeadTraining):
            source = LiveFeatures(context.target.model, module.captured_layers, remember=True)

        def sums(prepared: nn.Module, given: Inputs, ids: Sequence[str]) -> Tensor:
            if backbone is not None:
                return backbone.forward(prepared, given, ids, losses, 1.0, dev=True)[1]
            return self._forward(prepared, source, given, ids, losses)[1]

        def decoded(weights: dict[str, Tensor]) -> tuple[Target, Drafter]:
            whole.load_state_dict(_heads_in(weights, backbone))
            target = context.target if backbone is None else backbone.new_target(weights)
            return target, self._drafter(target, whole)

        def figures(found: Tensor) -> dict[str, float]:
            return module.figures(dict(zip(names, found.tolist(), strict=True)))

        return DevSlice(settings.dev, context, settings.name, Judging(sums, figures, "", decoded))

    def _bigrams(
        self, context: StageContext, samples: Sequence[Sample], dev: DevSlice | None
    ) -> dict[str, float]:
        """The shares of the dev slice's tokens that a bigram table of the training text and prompt
        lookup predict. The first head must be better than both."""
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


def _heads_in(weights: Mapping[str, Tensor], backbone: Backbone | None) -> dict[str, Tensor]:
    """The heads' weights from the weights of the trained module."""
    prefix = "heads." if backbone is None else "heads.heads."
    return {k.removeprefix(prefix): x for k, x in weights.items() if k.startswith(prefix)}
