"""The training loop of every training stage, built on accelerate, and what it measures."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from decode.base.device import to_device
from decode.base.errors import UserError
from distill.float32_products import float32_products
from distill.flops import TextFlops
from train.base.console import Reporter
from train.base.stage import StageWork
from train.data.batches import Batches, RankText, collate, inputs, padding_share
from train.data.chat_tokens import Sample
from train.data.stored_samples import sample_ids, sizes
from train.loop import parallel
from train.loop.best_version import BestVersion
from train.loop.checkpoint import Checkpoints, Stopped, StopRequest
from train.loop.meters.peak_flops import device_peak
from train.loop.meters.peak_memory import peak_memory
from train.loop.meters.profiler import StepProfiler
from train.loop.meters.throughput import Throughput, flops_of, in_words
from train.loop.optimizer import grouped_names, make_optimizer
from train.loop.optimizer_step import take_step
from train.loop.rank_weights import RankWeights
from train.loop.training_task import TrainingProgress, TrainingTask, steps_in
from train.loop.weight_average import EMA
from train.settings.optimizer_config import OptimizerConfig
from train.settings.training import LoopConfig

CHECKPOINTS = "checkpoints"  # in the directory of a training stage
AVERAGE = "average"  # in a checkpoint
# A step with a gradient and a learning rate above this changes some float32 weight: AdamW moves
# each by nearly the learning rate.
MOVES = 1e-6


class TrainingClock:
    """Seconds by activity. An activity inside another is not counted twice.

    A GPU works asynchronously, so a clock must wait for it to measure anything. Waiting slows down
    training, so only every n-th step is measured, and it counts n times.

    weight: how many times the current work counts. 0: no measuring and no waiting.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self.weight = 1.0
        self._device = device
        self._running: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, activity: str) -> Iterator[None]:
        """The time inside this context counts as `activity`."""
        self._turn()
        self._running.append(activity)
        try:
            yield
        finally:
            self._turn()
            self._running.pop()

    def _turn(self) -> None:
        if self.weight and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if self._running and self.weight:
            activity = self._running[-1]
            elapsed = self.weight * (now - self._since)
            self.seconds[activity] = self.seconds.get(activity, 0.0) + elapsed
        self._since = now

    def shares(self) -> dict[str, float]:
        """Each activity's share of the measured time. The shares add up to 1."""
        total = sum(self.seconds.values())
        return {name: seconds / total for name, seconds in self.seconds.items()} if total else {}


class _Round:
    """One round's samples in batches."""

    def __init__(self, number: int, samples: Sequence[Sample], loop: LoopConfig) -> None:
        self.number, self.samples = number, samples
        self.lengths, self.predicted = sizes(samples)
        size, seed = loop.tokens_per_batch, loop.seed
        self.batches = Batches(self.lengths, tokens_per_batch=size, seed=seed, epoch=number)

    def flops(self, rule: TextFlops | None, numbers: Iterable[int]) -> float:
        """The FLOPs of these batches by `rule`; 0 without one."""
        rows = [i for number in numbers for i in self.batches.batch(number)]
        return flops_of(rule, self.lengths[rows].tolist(), int(self.predicted[rows].sum()))


class Trainer:
    """Trains a module on samples. After a kill, it continues from the newest checkpoint.

    Raises UserError if accumulation is larger than the number of batches, if parameter groups match
    nothing, and for everything that `train.loop.parallel` refuses.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        reporter: Reporter,
        task: TrainingTask,
        loop: LoopConfig,
        optimizer: OptimizerConfig,
        directory: Path,
        *,
        clock: TrainingClock | None = None,
        allow_changes: bool = False,
        profile_steps: int | None = None,
    ) -> None:
        """profile_steps: the number of steps to profile. None: no profile."""
        self.accelerator, self.reporter, self.task, self.loop = accelerator, reporter, task, loop
        self.settings = optimizer
        self.clock = clock or TrainingClock(accelerator.device)
        self._round: _Round | None = None
        adamw = make_optimizer(task.module, optimizer)
        trained = grouped_names(task.module, adamw)
        self.trained_parameters = sum(
            p.numel() for group in adamw.param_groups for p in group["params"]
        )
        self._weights = RankWeights(accelerator, task.module)
        self.module, self.optimizer = parallel.prepare(
            accelerator, task.module, adamw, clip=optimizer.clip
        )
        self._weights.follow(self.module)
        self._should_change = False
        self.average = None
        if optimizer.ema is not None:
            self.average = EMA(self._weights.local(), optimizer.ema)
        self.checkpoints = Checkpoints(
            accelerator,
            directory / CHECKPOINTS,
            reporter,
            keep=loop.keep_checkpoints,
            trained=trained,
            allow_changes=allow_changes,
        )
        self.best = BestVersion(accelerator, self.checkpoints) if loop.keep_best else None
        peak = device_peak(accelerator.device, accelerator.mixed_precision)
        self.throughput = Throughput(peak and peak * accelerator.num_processes)
        self.profiler = None
        if profile_steps is not None and accelerator.is_main_process:
            self.profiler = StepProfiler(
                directory / "profile", profile_steps, accelerator.device, reporter
            )
        self.total_steps = 0
        self.progress = TrainingProgress()

    def fit(self) -> TrainingProgress:
        """Train to the end.

        Raises UserError if more than `max_skipped_steps` have a loss or gradient that is not
        finite. Raises Stopped, after saving a checkpoint, if the process was asked to stop.
        """
        groups = [dict(group) for group in self.optimizer.param_groups]
        stored = self.checkpoints.load(self._load_average)
        # A checkpoint has the optimizer's settings too. Those of now count.
        for group, now in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({name: value for name, value in now.items() if name != "params"})
        self.progress = progress = TrainingProgress(**stored) if stored else TrainingProgress()
        if self.best is None:
            progress.best = None
        self.clock.seconds |= progress.clock
        # Of the limit that is set now: it may have changed.
        limit = 60 * (self.loop.max_minutes or math.inf)
        if progress.seconds < limit:
            progress.time_share = progress.seconds / limit
        begin = time.perf_counter() - progress.seconds
        self.total_steps = self._total_steps()
        self.reporter.continue_figures(self.task.label, progress.step)
        if stored:
            self.reporter.say(f"  continuing after step {progress.step} of {self.total_steps}")
        if not self._ended():
            average, best = self.average is not None, self.best is not None
            self.checkpoints.require_space(self.module, self.optimizer, average=average, best=best)
        request = StopRequest()
        self.module.train()
        with (
            request.listening(),
            self.reporter.bar("training", self.total_steps) as bar,
            self.profiler or nullcontext(),
        ):
            bar.update(progress.step)
            speed: dict[str, float] = {}
            while not self._ended():
                current = self._text(progress.round)
                if progress.batch >= len(current.batches):
                    progress.round, progress.batch = progress.round + 1, 0
                    continue
                number = progress.step + 1
                log = number == self.total_steps or number % self.loop.log_every == 0
                if self.accelerator.device.type != "cpu":
                    self.clock.weight = self.loop.log_every if log else 0
                progress.seconds = time.perf_counter() - begin
                first, tokens = progress.batch, progress.tokens
                entry, taken, stopping = self._optimizer_step(progress, current, request)
                last = self._ended()
                self.clock.weight = 1
                seconds = time.perf_counter() - begin - progress.seconds
                progress.seconds += seconds
                flops = current.flops(self.task.flops, range(first, progress.batch))
                progress.step_seconds += seconds * self.accelerator.num_processes
                progress.flops += flops
                self.throughput.add(seconds, progress.tokens - tokens, flops)
                if self.profiler is not None:
                    self.profiler.end_step(number)
                if self.task.measure and (last or number % self.task.measure_every == 0):
                    progress.dev.append(self._measure() | {"step": number})
                    self._log({f"dev/{k}": v for k, v in progress.dev[-1].items()})
                    progress.seconds = time.perf_counter() - begin
                    last = self._ended()
                if taken and (log or last):
                    progress.history.append(entry | {"step": number, "epoch": progress.round})
                    speed = self.throughput.figures()
                    self._log(entry | speed | {"memory_gib": peak_memory() / 2**30})
                    self._log({f"time/{k}": v for k, v in self.clock.shares().items()})
                bar.update(number, f"loss {entry['loss']:.3f}, {in_words(speed)}".rstrip(", "))
                if last or stopping or number % self.loop.save_every == 0:
                    progress.clock = dict(self.clock.seconds)
                    self.checkpoints.save(number, vars(progress), self._save_average)
                if stopping:  # also after the last step: the run must stop, not only this stage
                    raise Stopped(f"stopped after step {number} of {self.total_steps}")
        self._text(progress.round)  # for `padding_share`, even if no step was left
        return progress

    @property
    def work(self) -> StageWork:
        """An equal part, for each of today's processes, of what all steps computed."""
        progress, world = self.progress, self.accelerator.num_processes
        dtype = torch.bfloat16 if self.accelerator.mixed_precision == "bf16" else torch.float32
        return StageWork(dtype, progress.flops / world, progress.step_seconds / world)

    def done_share(self, step: int) -> float:
        """The share of the training that is done at a step: of its steps, or of its time."""
        return max(step / self.total_steps, min(1.0, self.progress.time_share))

    def _ended(self) -> bool:
        progress = self.progress
        if progress.step >= self.total_steps or progress.time_share >= 1:
            return True
        return self.loop.patience is not None and progress.without_gain >= self.loop.patience

    @contextmanager
    def final_weights(self) -> Iterator[None]:
        """Inside this context the module has the weights that are evaluated and saved: the EMA
        weights, if there is an EMA."""
        if self.average is None:
            yield
            return
        with self._weights.exchanged(self.average.shards):
            yield

    def drafter_weights(self, prefix: str = "", *, everywhere: bool = False) -> dict[str, Tensor]:
        """The weights of the version that the stage's drafter is made of: the best one, if the
        settings say so, or that of `final_weights`.

        everywhere: for all ranks; otherwise the others get nothing. Otherwise as `weights`. Raises
        UserError if the training should have changed a weight, and none has changed.
        """
        self._require_change()
        best = self.progress.best
        if self.best is not None and best is not None:
            self.reporter.say(
                f"  the drafter is the version after step {best['step']} of {self.progress.step}, "
                f"with the best {best['figure']} on dev text: {best['value']:.3f}"
            )
            weights = self._weights.gathered(prefix, everywhere=everywhere)
            return weights and weights | self.best.load(best["step"], prefix)
        with self.final_weights():
            return self._weights.gathered(prefix, everywhere=everywhere)

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        """The complete weights whose names begin with `prefix`, trained or not, on the CPU of every
        rank. The prefix is removed from the names. Every rank must call this."""
        return self._weights.gathered(prefix)

    def _require_change(self) -> None:
        if self._weights.changed() or not self.progress.step:
            return
        what = f"stage {self.task.label}: no weight changed in {self.progress.step} steps"
        if self.progress.skipped == self.progress.step:
            raise UserError(
                f"{what}: the loss or the gradient of each was not finite, so the drafter would be "
                "its start and is not written. Check the teacher and the samples that the lines "
                "above name, and delete this stage's directory to train it again"
            )
        if self._should_change:
            raise UserError(
                f"{what}, although their gradients and learning rates are large enough, so the "
                "drafter would be its start and is not written. The launched engine trains other "
                "weights than those that are saved. Launch without dynamo_backend and the like, "
                "and delete this stage's directory to train it again"
            )
        self.reporter.say(
            f"  {what}: the drafter is its start. The gradients are 0, or optimizer.lr is too "
            "small for float32"
        )

    def _optimizer_step(
        self, progress: TrainingProgress, current: _Round, request: StopRequest
    ) -> tuple[dict[str, float], bool, bool]:
        """Take one step over `accumulation` global batches. Returns the step's figures, such as the
        mean loss per token and its terms; whether they are finite, so that it was taken; and
        whether any rank was asked to stop."""
        accelerator, batches = self.accelerator, current.batches
        rank, world = accelerator.process_index, accelerator.num_processes
        last = min(progress.batch + self.loop.accumulation, len(batches))
        numbers = range(progress.batch, last)
        # Every rank knows the complete global batch, so its token count needs no communication.
        rows = [i for n in numbers for i in batches.batch(n)]
        tokens = int(current.predicted[rows].sum())
        sums = torch.zeros(len(self.task.terms), dtype=torch.float64, device=accelerator.device)
        total = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        text = RankText(current.number, current.samples, batches, rank, world)
        for number in numbers:
            with self.clock("data"):
                if self.task.look_ahead is not None:
                    self.task.look_ahead(text, number)
                batch = collate(text.batch(number), self.task.pad_id)
                tensors = inputs(batch, accelerator.device)
            final = number + 1 == last
            with (
                parallel.batch_context(accelerator, self.module, last=final),
                self.clock("drafter"),
                float32_products(self.module),
            ):
                loss, parts = self.task.step(self.module, tensors, batch["ids"])
                # 0, or NaN if a loss is not finite. Then no rank has a gradient, with any engine.
                found = loss.detach() + parts.sum()
                # Engines average gradients over ranks; this turns it into a mean over tokens.
                factor = world / tokens + (found - found)
                parallel.backward(accelerator, self.module, loss * factor)
            sums += parts
            total += loss.detach()
        time_share = progress.seconds / (60 * (self.loop.max_minutes or math.inf))
        flags = torch.tensor([request.received, time_share / world], dtype=torch.float64)
        # One exchange, so that all ranks end after the same step.
        figures_of_rank = torch.cat([total[None], sums, to_device(flags, accelerator.device)])
        reduced = accelerator.reduce(figures_of_rank).tolist()
        *values, stopping, progress.time_share = reduced
        sums_by_term = dict(zip(self.task.terms, values[1:], strict=True))
        figures = self.task.figures or _means
        entry = {"loss": values[0] / tokens, **figures(sums_by_term, tokens)}
        bad = _not_finite(entry)
        with self.clock("drafter"):
            norm, lr = take_step(
                self.optimizer,
                self.settings,
                step=progress.step,
                total=self.total_steps,
                time_share=progress.time_share,
                clip=partial(parallel.clip_gradients, accelerator, self.module),
            )
        entry |= {"gradient_norm": norm, "lr": lr}
        bad = bad or _not_finite(entry)
        if bad:
            self._skip(progress, bad, sample_ids(current.samples, rows))
        else:
            self._should_change |= min(norm, lr) > MOVES
            if self.average:
                self.average.update(self._weights.local(), progress.step + 1)
        progress.step += 1
        progress.batch, progress.tokens = last, progress.tokens + tokens
        return entry, not bad, stopping > 0

    def _skip(self, progress: TrainingProgress, bad: Sequence[str], ids: Sequence[str]) -> None:
        """Count a step that was not taken. bad: its figures that are not finite. ids: those of its
        samples. Raises UserError if there are too many."""
        step, most = progress.step + 1, self.loop.max_skipped_steps
        what = (
            f"step {step}: {', '.join(bad)} is not finite, so the step was not taken; samples: "
            f"{', '.join(ids)}"
        )
        if progress.skipped >= most:
            raise UserError(
                f"{what}. loop.max_skipped_steps is {most}, and {progress.skipped} were skipped "
                "before. Lower the learning rate, check these samples, or raise that setting."
            )
        progress.skipped += 1
        progress.last_skipped = {"step": step, "figures": list(bad), "samples": list(ids)}
        self.reporter.say(f"  {what} ({progress.skipped} of at most {most} so far)")

    def _text(self, number: int) -> _Round:
        if self._round is None or self._round.number != number:
            with self.clock("text"):
                samples = self.task.text.round(number, self.weights)
            first = self._round is None
            self._round = _Round(number, samples, self.loop)
            if first:
                self._say_idle(self._round)
            if self.loop.accumulation > len(self._round.batches):
                raise UserError(
                    f"accumulation is {self.loop.accumulation}, but an epoch has only "
                    f"{len(self._round.batches)} batches; lower accumulation or tokens_per_batch"
                )
        return self._round

    def _say_idle(self, current: _Round) -> None:
        """Say how many ranks get no row of a batch, if that is 1% of them or more."""
        world, size = self.accelerator.num_processes, self.loop.tokens_per_batch
        idle = current.batches.idle_ranks(world)
        if idle >= world / 100:
            longest = int(current.lengths.max())
            self.reporter.say(
                f"  on average {idle:.1f} of {world} ranks get no row of a batch: {size} tokens "
                f"(loop.tokens_per_batch) are for all ranks together, and rows have up to "
                f"{longest}. All ranks work with loop.tokens_per_batch={world * longest}"
            )

    def _total_steps(self) -> int:
        if not self.task.text.fixed:
            assert self.loop.max_steps is not None, "text that is generated later has no length"
            return self.loop.max_steps
        # Always counted on the first round, even after a resume: epochs may differ by one batch,
        # but the learning rate must not.
        first = _Round(0, self.task.text.round(0, self.weights), self.loop)
        return steps_in(self.loop, len(first.batches))

    def _measure(self) -> dict[str, float]:
        assert self.task.measure is not None
        with self.clock("dev"), self.final_weights():
            self.module.eval()
            figures = self.task.measure(self.module, self.weights)
            self.module.train()
            if self.best is not None:
                trained = partial(self._weights.gathered, frozen=False, everywhere=False)
                self.best.keep_if_better(self.progress, self.task.deciding, figures, trained)
        return figures

    def _log(self, figures: dict[str, float]) -> None:
        labelled = {f"{self.task.label}/{k}": v for k, v in figures.items()}
        step = self.reporter.log_figures(self.task.label, self.progress.step, figures)
        self.accelerator.log(labelled, step)

    def _save_average(self, directory: Path) -> None:
        if self.average:
            self._weights.save_shards(self.average.shards, directory / AVERAGE)

    def _load_average(self, directory: Path) -> None:
        if not self.average:
            return
        shards = self.average.shards
        if any(directory.glob(f"{AVERAGE}*")):
            self._weights.load_shards(shards, directory / AVERAGE)
            return
        # `optimizer.ema` is a new setting: the average begins with the weights of now.
        for shard, weight in zip(shards, self._weights.local(), strict=True):
            shard.copy_(weight)

    def padding_share(self) -> float:
        """The share of padding among the batch positions of the newest round."""
        assert self._round is not None, "nothing was trained on yet"
        batches = self._round.batches
        return padding_share(map(batches.batch, range(len(batches))), self._round.lengths)


def _means(sums: dict[str, float], tokens: int) -> dict[str, float]:
    return {term: value / tokens for term, value in sums.items()}


def _not_finite(entry: dict[str, float]) -> list[str]:
    return [name for name, value in entry.items() if not math.isfinite(value)]
