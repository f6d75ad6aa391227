"""The training loop that every trained stage shares, on top of accelerate."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from pydantic import Field
from torch import Tensor, nn

from decode.errors import UserError
from train import engines
from train.checkpoint import load_checkpoint, save_checkpoint
from train.console import Reporter
from train.data.batches import Batch, Batches, collate, padding_share
from train.data.chat import Sample
from train.schema import Strict

# (module, batch) → (loss summed over its tokens, each term's sum [terms])
Step = Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]


class OptimizerConfig(Strict):
    """AdamW, with the learning rate warmed up linearly and then lowered by a schedule."""

    lr: float = Field(3e-4, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    clip: float = Field(1.0, gt=0)
    warmup_steps: int = Field(10, ge=0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    min_lr_ratio: float = Field(0.02, ge=0, le=1)


class LoopConfig(Strict):
    """How long is trained, and on how much at a time.

    tokens_per_batch: rows times the longest row's length, of all ranks together.
    accumulation: batches per optimizer step. max_steps ends before `epochs` do.
    """

    epochs: int = Field(3, ge=1)
    max_steps: int | None = Field(None, ge=1)
    tokens_per_batch: int = Field(2048, ge=1)
    accumulation: int = Field(1, ge=1)
    save_every: int = Field(100, ge=1)
    log_every: int = Field(5, ge=1)
    seed: int = 0


@dataclass
class Progress:
    """Where training stands; stored in every checkpoint."""

    step: int = 0
    epoch: int = 0
    batch: int = 0  # the next batch of the epoch
    seconds: float = 0.0
    tokens: int = 0
    history: list[dict[str, float]] = field(default_factory=list)


class Trainer:
    """Trains a module on samples; a killed run of it goes on from its newest checkpoint.

    label: the stage's name, before every logged figure. terms: what the parts of a step's loss
    are called.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        reporter: Reporter,
        label: str,
        module: nn.Module,
        step: Step,
        terms: Sequence[str],
        samples: Sequence[Sample],
        pad_id: int,
        loop: LoopConfig,
        optimizer: OptimizerConfig,
        directory: Path,
    ) -> None:
        self.accelerator, self.reporter, self.label = accelerator, reporter, label
        self.samples, self.pad_id, self.loop, self.directory = samples, pad_id, loop, directory
        self.step, self.terms = step, list(terms)
        self.lengths = [len(sample.tokens) for sample in samples]
        self._order: tuple[int, Batches] | None = None  # the batches of one epoch
        per_epoch = len(self._batches(0))
        if loop.accumulation > per_epoch:
            raise UserError(
                f"accumulation is {loop.accumulation} and an epoch has {per_epoch} batches; lower "
                "it, or make batches smaller"
            )
        self.total_steps = steps_in(loop, per_epoch)
        parameters = [p for p in module.parameters() if p.requires_grad]
        chosen = torch.optim.AdamW(
            parameters,
            lr=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            betas=(optimizer.beta1, optimizer.beta2),
        )
        self.settings = optimizer
        self.module, self.optimizer = engines.prepare(
            accelerator, module, chosen, clip=optimizer.clip
        )

    def fit(self) -> Progress:
        """Train to the end. Raises UserError before a step whose loss or gradient is not finite."""
        accelerator = self.accelerator
        checkpoints = self.directory / "checkpoints"
        stored = load_checkpoint(accelerator, checkpoints, self.reporter)
        at = Progress(**stored) if stored else Progress()
        if stored:
            self.reporter.say(f"  going on after step {at.step} of {self.total_steps}")
        begin = time.perf_counter() - at.seconds
        self.module.train()
        with self.reporter.bar("training", self.total_steps) as bar:
            bar.update(at.step)
            while at.step < self.total_steps:
                batches = self._batches(at.epoch)
                if at.batch >= len(batches):
                    at.epoch, at.batch = at.epoch + 1, 0
                    continue
                entry = self._optimizer_step(at, batches)
                at.seconds = time.perf_counter() - begin
                note = f"loss {entry['loss']:.3f}, {at.tokens / at.seconds:.0f} tokens/s"
                bar.update(at.step, note)
                if at.step % self.loop.log_every == 0 or at.step == self.total_steps:
                    at.history.append(entry | {"step": at.step, "epoch": at.epoch})
                    logged = entry | {"tokens_per_second": at.tokens / at.seconds}
                    accelerator.log({f"{self.label}/{k}": v for k, v in logged.items()}, at.step)
                if at.step % self.loop.save_every == 0 or at.step == self.total_steps:
                    save_checkpoint(accelerator, checkpoints, at.step, vars(at))
        return at

    def _optimizer_step(self, at: Progress, batches: Batches) -> dict[str, float]:
        """One step over `accumulation` global batches; the mean loss per token and its terms."""
        accelerator = self.accelerator
        rank, world = accelerator.process_index, accelerator.num_processes
        last = min(at.batch + self.loop.accumulation, len(batches))
        numbers = range(at.batch, last)
        # Every rank knows the whole global batch, so the mean over its tokens needs no exchange.
        tokens = sum(sum(self.samples[i].mask[1:]) for n in numbers for i in batches.batch(n))
        sums = torch.zeros(len(self.terms), dtype=torch.float64, device=accelerator.device)
        total = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        for number in numbers:
            rows = [self.samples[i] for i in batches.for_rank(rank, world).batch(number)]
            batch = collate(rows, self.pad_id)
            for name in ("input_ids", "attention_mask", "loss_mask"):
                batch[name] = batch[name].to(accelerator.device)
            with engines.part(accelerator, self.module, last=number + 1 == last):
                loss, parts = self.step(self.module, batch)
                # Engines average gradients over ranks; the mean wanted here is over tokens.
                engines.backward(accelerator, self.module, loss * world / tokens)
            sums += parts
            total += loss.detach()
        # A pure function of the step, so there is no scheduler whose state could be lost.
        lr = self.settings.lr * learning_rate_factor(at.step, self.total_steps, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        values = accelerator.reduce(torch.cat([total[None], sums])).tolist()
        entry = {
            "loss": values[0] / tokens,
            **{name: x / tokens for name, x in zip(self.terms, values[1:], strict=True)},
        }
        self._require_finite(entry, at, numbers, batches)
        norm = engines.optimizer_step(
            accelerator, self.module, self.optimizer, clip=self.settings.clip
        )
        entry |= {"gradient_norm": norm, "lr": lr}
        self._require_finite(entry, at, numbers, batches)
        at.step, at.batch, at.tokens = at.step + 1, last, at.tokens + tokens
        return entry

    def _require_finite(
        self, entry: dict[str, float], at: Progress, numbers: range, batches: Batches
    ) -> None:
        bad = [name for name, value in entry.items() if not math.isfinite(value)]
        if bad:
            ids = [self.samples[i].id for n in numbers for i in batches.batch(n)]
            raise UserError(
                f"step {at.step + 1}: {', '.join(bad)} is not finite, so the step was not taken; "
                f"samples: {', '.join(ids)}. Lower the learning rate, or look at these samples."
            )

    def _batches(self, epoch: int) -> Batches:
        if self._order is None or self._order[0] != epoch:
            batches = Batches(
                self.lengths,
                tokens_per_batch=self.loop.tokens_per_batch,
                seed=self.loop.seed,
                epoch=epoch,
            )
            self._order = (epoch, batches)
        return self._order[1]

    def padding_share(self) -> float:
        """Share of the first epoch's batch positions that are padding."""
        batches = self._batches(0)
        return padding_share([batches.batch(i) for i in range(len(batches))], self.lengths)


def steps_in(loop: LoopConfig, batches_per_epoch: int) -> int:
    """Optimizer steps of a whole training."""
    steps = loop.epochs * math.ceil(batches_per_epoch / loop.accumulation)
    return min(steps, loop.max_steps or steps)


def learning_rate_factor(step: int, total: int, config: OptimizerConfig) -> float:
    """What the learning rate is multiplied by at a step: linear warm-up, then the schedule."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = min(1.0, (step - config.warmup_steps) / max(1, total - config.warmup_steps))
    shape = {
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "linear": 1 - done,
        "constant": 1.0,
    }[config.schedule]
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape


def describe(progress: Progress) -> dict[str, Any]:
    """What a stage's summary and the report keep of a training."""
    return {
        "steps": progress.step,
        "tokens": progress.tokens,
        "training_seconds": progress.seconds,
        "tokens_per_second": progress.tokens / progress.seconds if progress.seconds else None,
        "history": progress.history,
    }
