"""`heads`: small modules on the frozen target learn to predict the tokens after its next token.

One stage trains all kinds of heads (Medusa 2401.10774, Blockwise 1811.03115, …). The kinds differ
only in their computation (`heads.heads_module`), not in the training around it.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from decode.base.errors import UserError
from decode.drafters import DRAFTERS, Drafter
from decode.model.forward.weight_bytes import use_bytes
from decode.model.loading import Target
from decode.opening.directory import describe_drafter
from decode.shapes.static import store_tree
from distill.adapter_directory import save_adapter
from distill.agreement import Bigrams, lookup_top1
from distill.drift import Drift
from distill.flops import TextFlops
from distill.teacher.linear_logits import require_linear_logits
from distill.trainable_model import Trainable, linear_sizes
from heads.head_training import HeadTraining, require_losses
from heads.heads_directory import build_heads, make_ready, new_heads, read_heads, save_heads
from heads.heads_module import Heads
from heads.joint_training import JointTraining
from train.base.stage import STAGES, StagePlan, StageResult
from train.data.batches import Inputs
from train.data.chat_tokens import Sample
from train.data.read import spread
from train.data.stored_samples import StoredSamples
from train.data.training_text import FixedText
from train.loop import parallel
from train.loop.dev_slice import DevJudging, DevSlice, require_dev_text
from train.loop.estimates import (
    planned_tokens,
    steps_in_words,
    time_limit,
    training_disk_bytes,
)
from train.loop.head_start import check_start_directory, start_directory
from train.loop.head_tree import calibrated_tree, require_tree
from train.loop.heads_target import FrozenHeadsTarget, HeadsTarget, StateSource
from train.loop.meters.stage_flops import heads_flops
from train.loop.trained_heads_target import TrainedHeadsTarget
from train.loop.trained_target import held_out_samples, trained_parameters
from train.loop.trainer import Trainer, TrainingClock
from train.loop.training_task import TrainingTask
from train.measure.calibrate_tree import TreeCalibration
from train.measure.ranks import Ranks
from train.settings.heads_config import HeadsConfig
from train.settings.schema import StageConfig
from train.settings.training import PREFIX
from train.stages.heads_features import open_source, planned_source
from train.stages.text_stages import TrainingStage
from train.stages.training_memory import heads_memory

BIGRAM_TOKENS = 10_000_000  # of the text, that a bigram table counts


def require_decoder_only_parts(config: HeadsConfig) -> None:
    """Raise UserError for settings that do not work if the target has an encoder."""
    used = {
        "backbone": config.backbone is not None,
        "dev": config.dev is not None,
        "another source of features than the live target": config.features != "live",
        "a loss that reads the teacher": config.needs_teacher,
    }
    for name, is_used in used.items():
        if is_used:
            raise UserError(
                f"stage {config.name}: {name} needs a decoder-only target, and this target has an "
                "encoder; leave it out"
            )


@STAGES.register("heads")
class HeadsStage(TrainingStage[HeadsConfig]):
    """Trains heads on text and the target's hidden states, and writes them to `drafter/`."""

    with_encoder = True

    @classmethod
    def check(cls, config: HeadsConfig, earlier: Sequence[StageConfig]) -> None:
        if config.start is not None and config.starts_from_directory(earlier):
            check_start_directory(config, config.start)

    def plan(self, plans: Mapping[str, StagePlan]) -> StagePlan:
        config, target = self.config, self.target
        if target.has_encoder:
            require_decoder_only_parts(config)
        else:
            require_linear_logits(target.model)
        if config.start is None or config.start in plans:
            heads = build_heads(config.heads, target, self._planned_vocabulary(), "meta")
        else:
            heads = read_heads(self._start_directory(), target)
        self._require_ready(heads)
        if config.place_smoothing is not None and len(heads.loss_weights(0.0)) < 2:
            raise UserError(
                f"stage {config.name}: place_smoothing weighs the places of a draft against each "
                f"other, but a batch trains one place of these {config.heads.type} heads; leave it "
                "out"
            )
        trained = parameters = sum(p.numel() for p in heads.parameters())
        if config.start is not None and config.start in plans:
            trained = parameters = plans[config.start].trained_parameters
        if config.lora is not None:
            trained = config.lora.parameters(linear_sizes(heads, heads.read_directly))
            parameters += trained
        loop, ema = config.loop, config.optimizer.ema is not None
        held, files, source = planned_source(config, target, heads, self.processes, plans)
        memory = held + heads_memory(
            config,
            heads,
            target,
            target_bytes=self.target_bytes,
            parameters=parameters,
            trained=trained,
            processes=self.processes,
            itemsize=self.product_bytes,
        )
        disk = training_disk_bytes(parameters, trained, average=ema, loop=loop) + files
        options = config.heads.model_dump(exclude={"type"}, exclude_none=True)
        adapters = "adapters on " if config.lora is not None else ""
        what = (
            f"{adapters}{config.heads.type} ({', '.join(f'{k}={v}' for k, v in options.items())}); "
        )
        if config.backbone is not None:
            if config.backbone.held_out == "data":
                held_out_samples(config.backbone, self.corpus, config.name, PREFIX)
            trained += trained_parameters(config.backbone, target)
            what += f"the target too ({'LoRA' if config.backbone.lora else 'all weights'}); "
        tokens = planned_tokens(self.planned_tokens(plans), loop)
        flops = self._flops(heads, runs_target=False)
        return StagePlan(
            f"{what}{source}{config.loop.epochs} epochs, "
            f"{steps_in_words(tokens, loop, config.optimizer)}{self.idle_in_words(loop)}",
            trained_parameters=trained,
            tokens=tokens,
            memory=memory,
            disk_bytes=disk,
            max_seconds=time_limit(loop),
            drafters=1,
            runs_target=config.features == "live",
            training_flops=flops.per_token + flops.per_prediction if flops else 0.0,
        )

    def run(self) -> StageResult:
        samples, counts = self.fitting_samples()
        heads, start, coverage = self._start_heads(samples)
        parameters = sum(p.numel() for p in heads.parameters())
        trained = self._trainable(heads)
        clock = TrainingClock(self.accelerator.device)
        training = self._prepare(heads)
        with ExitStack() as stack:  # a server is up as long as the training needs it
            heads_target = self._heads_target(samples, clock, stack)
            module = heads_target.join(training, chunk=self.config.chunk_tokens)
            parallel.place(self.accelerator, module)
            dev = self._dev_slice(module, trained, heads_target)
            trainer = self._trainer(module, trained, heads_target, samples, dev, clock)
            # Before the training: whatever may go wrong here must not cost trained heads.
            guessed = Ranks.of(self.accelerator).main_only(lambda: self._bigrams(samples, dev))
            progress = trainer.fit()
        # A tree is planned by all ranks, unless the target is a new one.
        weights = trainer.drafter_weights(everywhere=self.config.backbone is None)
        summary = self.summary(trainer, counts, parameters)
        vocabulary = heads.vocabulary
        summary |= {"draft_vocabulary": None if vocabulary is None else len(vocabulary)}
        provenance = self.provenance(progress) | {"start": start}
        summary |= self._save(trained, heads_target, weights, provenance)
        summary |= coverage | guessed
        self.accelerator.free_memory()
        new_target = None if self.config.backbone is None else self.directory / "target"
        return StageResult(self.directory / "drafter", summary, new_target, trainer.work)

    def _trainable(self, heads: Heads) -> Trainable:
        """The heads in training, with their adapters."""
        lora = self.config.lora
        sizes = linear_sizes(heads, heads.read_directly)
        return Trainable(heads, lora=lora, layers=None if lora is None else lora.layers(sizes))

    def _start_heads(self, samples: Sequence[Sample]) -> tuple[Heads, Any, dict[str, float]]:
        """The heads to train, on the CPU; the provenance of the heads they continue; and the
        coverage of their draft vocabulary, if it was chosen here."""
        config = self.config
        vocabulary: Tensor | None = None
        coverage: dict[str, float] = {}
        start: Any = None
        if config.draft_vocabulary is not None:
            vocabulary, coverage = self.frequent_tokens(samples, config.draft_vocabulary)
        # Random weights and drawn sub-losses must not depend on what ran before this stage.
        torch.manual_seed(config.loop.seed)
        if config.start is None:
            heads = new_heads(config.heads, self.target, vocabulary)
        else:
            path = self._start_directory()
            start = describe_drafter(path)["provenance"]
            # Published weights may have another dtype; training needs float32.
            heads = read_heads(path, self.target).float()
        self._require_ready(heads)
        for token in heads.reserved_tokens:
            if any(token in sample.tokens for sample in samples):
                raise UserError(
                    f"stage {config.name}: heads of type {config.heads.type} use token {token} for "
                    "themselves, but the text contains it; expected an id that no text contains. "
                    "Set mask_token to another unused id, or remove the token from the text"
                )
        return heads, start, coverage

    def _start_directory(self) -> Path:
        """The directory of the drafter that this stage continues."""
        start = self.config.start or ""
        if start in self.earlier:
            return self.earlier[start] / "drafter"
        return start_directory(start)

    def _prepare(self, heads: Heads) -> HeadTraining:
        """The heads with their losses. What they borrow is on the accelerator's device."""
        device, target = self.accelerator.device, self.target.model
        if heads.vocabulary is not None:
            heads.vocabulary = heads.vocabulary.to(device)
        # Without autocast, matrix products are float32, so the borrowed weights must be too.
        full_precision = self.accelerator.mixed_precision == "no"
        heads.borrow(target, torch.float32 if full_precision else None)
        heads.gradient_checkpointing = self.config.gradient_checkpointing
        return HeadTraining(
            heads,
            self.config.weighted_loss,
            target,
            chunk=self.config.chunk_tokens,
            smoothing=self.config.place_smoothing,
        )

    def _heads_target(
        self, samples: StoredSamples, clock: TrainingClock, stack: ExitStack
    ) -> HeadsTarget:
        config, target = self.config, self.target
        if config.backbone is not None:
            return TrainedHeadsTarget(
                config.backbone, target, self.corpus, clock, stage=config.name
            )

        def features(captured_layers: Sequence[int]) -> StateSource:
            return open_source(self, self.config, samples, captured_layers, clock, stack)

        return FrozenHeadsTarget(target, features)

    def _trainer(
        self,
        module: HeadTraining | JointTraining,
        trained: Trainable,
        heads_target: HeadsTarget,
        samples: StoredSamples,
        dev: DevSlice | None,
        clock: TrainingClock,
    ) -> Trainer:
        config, heads = self.config, trained.model
        optimizer = config.optimizer
        if config.backbone is not None:
            optimizer = config.backbone.optimizer(optimizer)
        task = TrainingTask(
            config.name,
            module,
            heads_target.step_of(heads),
            module.sums,
            FixedText(samples),
            self.target.tokenizer.pad_token_id or 0,
            measure=dev.measure if dev else None,
            measure_every=config.dev.every if config.dev else 1,
            figures=module.figures,
            look_ahead=heads_target.look_ahead,
            deciding="tokens_per_step",
            flops=self._flops(heads, runs_target=config.features == "live"),
        )
        trainer = self.make_trainer(task, config.loop, optimizer, clock)
        heads_target.trainer = trainer
        return trainer

    def _flops(self, heads: Heads, *, runs_target: bool) -> TextFlops | None:
        """Of a training step. None: not known."""
        config = self.config
        if config.backbone is not None or config.lora is not None or self.target.has_encoder:
            return None
        return heads_flops(
            heads,
            self.target.model,
            runs_target=runs_target,
            reads_logits=config.needs_teacher,
        )

    def _dev_slice(
        self, module: HeadTraining | JointTraining, trained: Trainable, heads_target: HeadsTarget
    ) -> DevSlice | None:
        config = self.config
        if config.dev is None:
            return None
        losses = dict.fromkeys(range(1, trained.model.depth + 1), 1.0)
        names = module.sums

        def sums(prepared: nn.Module, batch: Inputs, ids: Sequence[str]) -> Tensor:
            return heads_target.forward(prepared, batch, ids, losses, 1.0, dev=True)[1]

        def make_drafter(weights: dict[str, Tensor]) -> tuple[Target, Drafter]:
            heads, _ = trained.merged_model(heads_target.heads_weights(weights))
            target = heads_target.target_with(weights)
            return target, self._drafter(target, heads)

        def figures(sums: Tensor) -> dict[str, float]:
            return module.figures(dict(zip(names, sums.tolist(), strict=True)))

        judging = DevJudging(sums, figures, "", make_drafter)
        return DevSlice(
            config.dev, judging, self.target, self.corpus, self.accelerator, stage=config.name
        )

    def _save(
        self,
        trained: Trainable,
        heads_target: HeadsTarget,
        weights: Mapping[str, Tensor],
        provenance: dict[str, Any],
    ) -> dict[str, Any]:
        """Write the new target, if there is one, and the drafter with its tree. Returns the
        summary's figures of the tree and of the target's drift."""
        tree: TreeCalibration | None = None
        drift: Drift | None = None
        target, path = self.target, self.directory / "drafter"
        ranks = Ranks.of(self.accelerator)
        if self.config.backbone is not None:
            ranks = replace(ranks, world=1)  # only the main process has the new target
        if ranks.rank < ranks.world:
            own = heads_target.heads_weights(weights)
            # Adapters that are kept apart are read from the weights, which a merge changes.
            full_heads, _ = trained.merged_model({name: x.clone() for name, x in own.items()})
        if self.accelerator.is_main_process:
            if isinstance(heads_target, TrainedHeadsTarget):
                target, drift = heads_target.save(weights, self.directory / "target")
                self.reporter.say(drift.in_words(self.directory / "target"))
            provenance |= {
                "drift": drift and drift.to_dict(),
                "original": drift and self.target.name,
            }
            if self.config.lora is None or self.config.lora.merge:
                save_heads(
                    path,
                    full_heads,
                    target=target,
                    provenance=provenance,
                    weights=self.config.weights,
                )
            else:
                base = self._start_directory()
                save_adapter(path, trained, own, base, target=target, provenance=provenance)
        # After saving: trained heads must not be lost if the tree cannot be planned.
        self.accelerator.wait_for_everyone()
        if ranks.rank < ranks.world:
            tree = self._tree(target, full_heads, path, ranks)
        return {
            "tree": tree and tree.to_dict() | {"paths": tree.structure.paths},
            "drift": drift and drift.to_dict(),
        }

    def _planned_vocabulary(self) -> Tensor | None:
        size = self.config.draft_vocabulary
        if size is None:
            return None
        if size >= self.target.vocab_size:
            raise UserError(
                f"draft_vocabulary is {size}; expected fewer tokens than the target's "
                f"{self.target.vocab_size}"
            )
        return torch.arange(size)

    def _require_ready(self, heads: Heads) -> None:
        """Raise UserError before the first step for reasons that would stop the stage later."""
        config = self.config
        require_losses(heads, config.weighted_loss)
        if config.dev is not None:
            require_dev_text(config.dev, self.corpus, stage=config.name)
        if config.tree is not None:
            require_tree(config.tree, self.target, self.corpus, stage=config.name)
        if config.gradient_checkpointing and heads.batch_parts == 1:
            raise UserError(
                f"stage {config.name}: gradient_checkpointing keeps one step, layer or head in "
                f"memory at a time, but these {config.heads.type} heads train one only; leave it "
                "out"
            )
        if config.backbone is not None and heads.joint_weight is None:
            raise UserError(
                f"stage {config.name}: heads of type {config.heads.type} cannot be trained "
                "together with the target; leave backbone out"
            )

    def _tree(
        self, target: Target, heads: Heads, path: Path, ranks: Ranks
    ) -> TreeCalibration | None:
        """Calibrate the tree with all `ranks`, and store it with the drafter in `path`. None if it
        drafts chains."""
        config = self.config
        if config.tree is None:
            return None
        drafter = self._drafter(target, heads)
        try:
            tree = calibrated_tree(
                config.tree, target, self.corpus, drafter, heads, self.reporter.say, ranks
            )
            if tree is not None and ranks.is_main:
                store_tree(path, tree.structure, tree.to_dict())
        except UserError as error:
            raise UserError(
                f"stage {config.name}: no tree could be planned: {error} The trained drafter is in "
                f"{path}. Start the run again to plan the tree; the drafter is not trained again."
            ) from error
        return tree

    def _drafter(self, target: Target, full_heads: Heads) -> Drafter:
        """The drafter made of heads on the CPU, which are its own then, as if loaded from a
        directory."""
        make_ready(full_heads, target, target.dtype)
        if self.config.weights is not None:
            use_bytes(full_heads)
        kind: Any = DRAFTERS[self.config.heads.type]
        return kind(full_heads, target.vocab_size)

    def _bigrams(self, samples: StoredSamples, dev: DevSlice | None) -> dict[str, float]:
        """The shares of the dev slice's tokens that a bigram table of the training text and prompt
        lookup predict. The first head must be better than both. Of a long text BIGRAM_TOKENS are
        counted, in samples spread evenly over it."""
        if dev is None:
            return {}
        share = min(1.0, BIGRAM_TOKENS / int(samples.lengths.sum(dtype=np.int64)))
        rows = spread(range(len(samples)), max(1, int(share * len(samples))))
        table = Bigrams((s.tokens, s.mask) for s in samples.some(rows))
        bigram = table.top1((s.tokens, s.mask) for s in dev.samples)
        lookup = lookup_top1((s.tokens, s.mask) for s in dev.samples)
        self.reporter.say(
            f"  on the dev slice a bigram table predicts {bigram:.1%} of the tokens, and prompt "
            f"lookup {lookup:.1%}"
        )
        return {"bigram_top1": bigram, "lookup_top1": lookup}
