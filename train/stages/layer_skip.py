"""`layer_skip`: the target learns to predict well after its first layers, which then draft
(LayerSkip, 2404.16710)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decode.drafters.skip import write_skip_drafter
from decode.model.forward.sublayers import Sublayers
from decode.model.kinds.layer_kinds import require_no_states
from decode.opening.directory import save_drafter
from distill.early_exit import EarlyExitTraining, dropout_rates, exit_weights, final_norm
from distill.row_numbers import row_numbers
from distill.teacher.linear_logits import require_linear_logits
from train.base.stage import STAGES, StageMemory, StagePlan, StageResult
from train.data.batches import Inputs
from train.data.training_text import FixedText
from train.loop import parallel
from train.loop.estimates import (
    activation_bytes,
    forward_bytes,
    model_loss_bytes,
    optimizer_bytes,
    planned_tokens,
    time_limit,
    tokens_per_rank,
    training_disk_bytes,
)
from train.loop.trained_target import TrainedTarget, held_out_samples, trained_parameters
from train.loop.trainer import TrainingClock
from train.loop.training_task import TrainingTask
from train.settings.layer_skip_config import LayerSkipConfig
from train.stages.text_stages import TrainingStage


@STAGES.register("layer_skip")
class LayerSkipStage(TrainingStage[LayerSkipConfig]):
    """Trains a copy of the target, and writes the new target to `target/` and its drafter, `skip`
    with the later layers, to `drafter/`."""

    def plan(self, plans: Mapping[str, StagePlan]) -> StagePlan:
        config, model = self.config, self.target.model
        layers = self._layers
        Sublayers.later(config.exit_layer, layers)
        require_linear_logits(model)
        final_norm(model)
        require_no_states(model)
        if config.held_out == "data":
            held_out_samples(config, self.corpus, config.name, "")
        trained = trained_parameters(config, self.target)
        parameters = model.num_parameters()
        loop, ema = config.loop, config.optimizer.ema is not None
        batch = tokens_per_rank(loop.tokens_per_batch, config.max_length, self.processes)
        memory = StageMemory(
            target=self.target_bytes,
            # The float32 copy, and the complete one that becomes the new target.
            weights=2 * 4 * parameters,
            optimizer=optimizer_bytes(trained, average=ema),
            activations=forward_bytes(model, batch)
            + activation_bytes(model, layers, batch, self.product_bytes),
            # Of student and teacher, for one chunk.
            logits=2 * 4 * config.chunk_tokens * self.target.vocab_size
            + model_loss_bytes(model, self.product_bytes, loop, trained=config.lora is None),
        )
        return StagePlan(
            f"exit after {config.exit_layer} of {layers} layers; the target is trained "
            f"({'LoRA' if config.lora else 'all weights'}); {config.losses_in_words}; "
            f"{loop.epochs} epochs{self.idle_in_words(loop)}",
            trained_parameters=trained,
            tokens=planned_tokens(self.planned_tokens(plans), loop),
            memory=memory,
            disk_bytes=training_disk_bytes(parameters, trained, average=ema, loop=loop)
            + self.target_bytes,
            max_seconds=time_limit(loop),
            drafters=1,
        )

    def run(self) -> StageResult:
        samples, counts = self.fitting_samples()
        config, device = self.config, self.accelerator.device
        clock = TrainingClock(device)
        # Adapters and dropped layers must not depend on what ran before this stage.
        torch.manual_seed(config.loop.seed)
        loss = config.weighted_loss
        trained = TrainedTarget(
            config, loss, self.target, self.corpus, clock, stage=config.name, key=""
        )
        model = trained.trainable.model
        parallel.place(self.accelerator, model)
        module = EarlyExitTraining(model, loss, chunk=config.chunk_tokens)
        layers = self._layers
        rates = dropout_rates(layers, config.layer_dropout)

        def step(module: nn.Module, batch: Inputs, ids: Sequence[str]) -> tuple[Tensor, Tensor]:
            at = trainer.progress.step
            exits = exit_weights(
                layers,
                config.exit_scale,
                step=at,
                done=trainer.done_share(at),
                rotation=config.rotation,
            )
            left_out = None
            if config.layer_dropout:
                left_out = row_numbers(len(batch["input_ids"]), layers).t() < rates[:, None]
            signal = trained.signal(batch, ids)
            return module(**batch, exits=exits, left_out=left_out, teacher=signal)

        task = TrainingTask(
            config.name,
            module,
            step,
            module.sums,
            FixedText(samples),
            self.target.tokenizer.pad_token_id or 0,
            figures=module.figures,
        )
        trainer = self.make_trainer(task, config.loop, config.optimizer, clock)
        progress = trainer.fit()
        weights = trainer.drafter_weights()
        summary = self.summary(trainer, counts, self.target.model.num_parameters())
        summary |= {"exit_layer": config.exit_layer}
        summary |= self._save(trained, weights, self.provenance(progress))
        self.accelerator.free_memory()
        return StageResult(self.directory / "drafter", summary, self.directory / "target")

    @property
    def _layers(self) -> int:
        return self.target.model.config.get_text_config().num_hidden_layers

    def _save(
        self, trained: TrainedTarget, weights: Mapping[str, Tensor], provenance: dict[str, Any]
    ) -> dict[str, Any]:
        """Write the new target and its drafter. Returns the summary's figures of the drift."""
        if not self.accelerator.is_main_process:
            return {"drift": None}
        path = self.directory / "target"
        target, drift = trained.save(weights, path)
        self.reporter.say(drift.in_words(path))
        skipped = Sublayers.later(self.config.exit_layer, self._layers)

        def write(directory: Path) -> None:
            write_skip_drafter(directory, skipped, target)

        provenance |= {"drift": drift.to_dict(), "original": self.target.name}
        save_drafter(
            self.directory / "drafter", "skip", write, target=target, provenance=provenance
        )
        return {"drift": drift.to_dict()}
