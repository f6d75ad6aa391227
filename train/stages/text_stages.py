"""Stages that work on a text: some train on it, others cache the target's results for it."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from decode.base.artifact import require_space, size, write_file
from decode.base.errors import UserError
from distill.choose_vocabulary import most_frequent
from distill.teacher.cache_directory import parts_of
from distill.teacher.cache_parts import (
    check_parts,
    free_numbers,
    lacking,
    note_checked,
    take_parts,
    text_sha256,
)
from distill.teacher.feature_sources import LiveFeatures
from train.base.run_files import TEXT
from train.base.stage import ReportSection, Stage, StageInputs, StagePlan, StagePlot, StageWork
from train.data.chat_tokens import Sample
from train.data.read import spread
from train.data.stored_samples import StoredSamples
from train.data.text_files import require_kept
from train.loop.estimates import PROMPTS_MEASURED, idle_in_words
from train.loop.live_window import LiveWindow
from train.loop.meters.stage_flops import pass_flops
from train.loop.meters.throughput import flops_of
from train.loop.teachers import Sources, lost_mass
from train.loop.trainer import Trainer, TrainingClock
from train.loop.training_task import TrainingProgress, TrainingTask
from train.measure.ranks import Ranks
from train.report.format_figures import format_share
from train.report.plots.line_plots import agreement_plot, loss_plot
from train.settings.optimizer_config import OptimizerConfig
from train.settings.text_settings import CacheConfig, LossConfig, TextConfig
from train.settings.training import LoopConfig

LOSS = "Training loss. Bold: running mean over a tenth of the steps."
DEV = "Agreement with the target on text it wrote for dev prompts."


T = TypeVar("T", bound=TextConfig)
K = TypeVar("K", bound=CacheConfig)
L = TypeVar("L", bound=LossConfig)

# (number of the part, its samples, (id, text_sha256) of each) → the number of scored tokens
WritePart = Callable[[int, Sequence[Sample], list[tuple[str, str]]], int]


class TextStage(Stage[T]):
    """A stage that reads a text. Its samples are not longer than the target's context."""

    def __init__(self, config: T, inputs: StageInputs) -> None:
        longest = min(config.max_length, inputs.target.max_positions)
        if longest < config.max_length:
            inputs.reporter.say(
                f"stage {config.name}: max_length is {config.max_length}, but the target has "
                f"{longest} positions; samples have at most {longest} tokens"
            )
        super().__init__(config.model_copy(update={"max_length": longest}), inputs)

    def planned_tokens(self, plans: Mapping[str, StagePlan]) -> int:
        """The number of response tokens of the text, before it exists. For a stage's answers this
        is the maximum."""
        if self.config.text == "data":
            return int(self.corpus.samples("data").predicted.sum())
        return sum(plans[name].tokens for name in self.config.text_stages)

    def planned_text_tokens(self, plans: Mapping[str, StagePlan]) -> int:
        """The number of tokens of the text with its prompts, before it exists."""
        if self.config.text == "data":
            return int(self._planned_lengths().sum())
        return sum(plans[name].text_tokens for name in self.config.text_stages)

    def _planned_lengths(self) -> np.ndarray:
        """int32 [n]: the tokens of each sample of the data."""
        return np.minimum(self.corpus.samples("data").lengths, self.config.max_length)

    def idle_in_words(self, loop: LoopConfig) -> str:
        """How many processes get no row of a batch, before the text exists; "" if all get one."""
        if self.processes == 1:
            return ""
        lengths = [self.config.max_length]
        if self.config.text == "data":
            lengths = spread(np.sort(self._planned_lengths()).tolist(), PROMPTS_MEASURED)
        return idle_in_words(lengths, loop, self.processes)

    def fitting_samples(self) -> tuple[StoredSamples, dict[str, int]]:
        """The samples that can be used, and their counts. Also prints the counts.

        All ranks call this together. Raises UserError on all of them, as `Corpus.samples`, and for
        a text without a sample.
        """
        config = self.config
        samples = self.corpus.samples(config.text).fitting(config.max_length, config.on_long)
        require_kept(samples.counts, config.max_length)
        record = json.dumps({"text": samples.directory.name})
        Ranks.of(self.accelerator).main_only(lambda: write_file(self.directory / TEXT, record))
        counts = dict(samples.counts)
        self.reporter.say("  text: " + ", ".join(f"{n} {what}" for what, n in counts.items() if n))
        return samples, counts

    def coverage(
        self, samples: Sequence[Sample], ids: Tensor, covered: float, what: str = "draft vocabulary"
    ) -> dict[str, float]:
        """How a draft vocabulary fits the samples' text, for the stage's summary. Also prints it.

        ids: int64 [n], the target's ids. covered: the share of the text that they cover. what: the
        name of the vocabulary.
        """
        lost = lost_mass(self.target, samples, ids)
        self.reporter.say(
            f"  {what}: {len(ids)} tokens cover {covered:.2%} of the text; on this text the target "
            f"gives {lost:.2%} of its probability to other tokens"
        )
        return {"draft_vocabulary_coverage": covered, "draft_vocabulary_lost_mass": lost}

    def frequent_tokens(
        self, samples: Sequence[Sample], count: int
    ) -> tuple[Tensor, dict[str, float]]:
        """The `count` most frequent tokens of the samples' text, int64 ascending, always with the
        end-of-text tokens; and their `coverage`."""
        ids, covered = most_frequent(
            (sample.tokens for sample in samples),
            count,
            self.target.vocab_size,
            always=self.target.eos_token_ids,
        )
        return ids, self.coverage(samples, ids, covered)


class CacheStage(TextStage[K]):
    """A stage that stores the target's results for a text in part-0, part-1, … A kill loses at most
    one part of each rank."""

    def write_parts(
        self,
        samples: StoredSamples,
        lengths: np.ndarray,
        token_bytes: int,
        write: WritePart,
        *,
        logits: int,
        kept: Sequence[Path] = (),
    ) -> tuple[int, float | None, StageWork]:
        """Write parts with the samples that no part holds, with all ranks together. Returns the
        number of tokens that they scored, how many per second, None if they scored none, and what
        this rank computed.

        lengths: int64 [n], the number of each sample's tokens that have results. token_bytes: the
        bytes of one token's results on disk. logits: the target's, of each predicted token. kept:
        parts that an earlier stage wrote in the same format. Those with samples that are missing
        become parts of this cache, too. Raises UserError before the first part if the disk lacks
        space for the missing ones, for a damaged part, and for a disk that fills up on the way.
        Finished parts are kept.
        """
        ranks, part_samples = Ranks.of(self.accelerator), self.config.part_samples
        tokens = int(lengths.sum())
        self.reporter.say(
            f"  {token_bytes} bytes a token, {tokens} tokens: {size(token_bytes * tokens)}"
        )
        begin, scored = time.perf_counter(), 0
        # Each rank hashes a share of the parts of an earlier start.
        ranks.together(lambda: check_parts(ranks.own(parts_of(self.directory))))
        ranks.main_only(lambda: take_parts(self.directory, kept, samples.texts(0, len(samples))))
        parts = parts_of(self.directory)
        missing = lacking(parts, samples.texts(0, len(samples)))
        if kept:
            found = len(samples) - len(missing)
            self.reporter.say(f"  {found} of {len(samples)} samples have their results already")
        firsts = range(0, len(missing), part_samples)
        numbers = free_numbers(parts)
        needed = token_bytes * int(lengths[missing].sum())
        require_space(self.directory, needed, f"the {len(firsts)} missing parts of this cache")
        # No rank may take a part of another rank for one of an earlier start.
        self.accelerator.wait_for_everyone()
        done = len(samples) - len(missing)
        flops, work = pass_flops(self.target, logits), StageWork(self.target.dtype)
        first_part = time.perf_counter()
        with self.reporter.bar("scoring", len(samples)) as bar:
            bar.update(done)
            for turn, (first, number) in enumerate(zip(firsts, numbers, strict=False)):
                if turn % ranks.world == ranks.rank:
                    # Each rank writes complete parts without communication, so no rank waits.
                    part = samples.take(missing[first : first + part_samples])
                    names = [(s.id, text_sha256(s.tokens, s.mask)) for s in part]
                    try:
                        scored += write(number, part, names)
                    except UserError as error:
                        raise UserError(
                            f"stage {self.config.name}: {error} The finished parts are kept; the "
                            "same command goes on with the missing ones."
                        ) from error
                    predicted = sum(sum(sample.mask[1:]) for sample in part)
                    work.flops += flops_of(flops, [len(s.tokens) for s in part], predicted)
                bar.update(done + min(first + part_samples, len(missing)))
        work.seconds = time.perf_counter() - first_part
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            # The writer hashed each part when it was whole.
            note_checked(self.directory, "cache")
        self.accelerator.wait_for_everyone()
        scored = sum(ranks.gather(scored))
        return scored, scored / (time.perf_counter() - begin) if scored else None, work


class TrainingStage(TextStage[L]):
    """A stage that trains on a text. Its summary has `training`, and `losses` by name."""

    @property
    def product_bytes(self) -> int:
        """The bytes of a number in the precision of the matrix products."""
        return 4 if self.accelerator.mixed_precision == "no" else 2

    def live_states(
        self,
        captured_layers: Sequence[int],
        loop: LoopConfig,
        clock: TrainingClock,
        sources: Sources | None,
    ) -> LiveFeatures | LiveWindow:
        """The source of the live target's hidden states, in windows if `tokens_per_pass` is set.
        sources: what the encoder reads for each sample; None: there is none."""
        timed = partial(clock, "teacher")
        live = LiveFeatures(self.target.model, captured_layers, timed=timed, sources=sources)
        if self.config.tokens_per_pass is None:
            return live
        return LiveWindow(
            live,
            loop,
            self.accelerator,
            tokens_per_pass=self.config.tokens_per_pass,
            pad_id=self.target.tokenizer.pad_token_id or 0,
        )

    def cache_directory(self, name: str) -> Path:
        """The directory of an earlier stage's cache. name: the stage's name, or its directory."""
        return self.earlier.get(name, Path(name))

    def make_trainer(
        self, task: TrainingTask, loop: LoopConfig, optimizer: OptimizerConfig, clock: TrainingClock
    ) -> Trainer:
        """A trainer that works in this stage's directory, with its processes."""
        return Trainer(
            self.accelerator,
            self.reporter,
            task,
            loop,
            optimizer,
            self.directory,
            clock=clock,
            allow_changes=self.allow_changes,
            profile_steps=self.profile_steps,
        )

    def provenance(self, progress: TrainingProgress) -> dict[str, Any]:
        """The provenance of a drafter that was trained here."""
        trained = {"steps": progress.step, "tokens": progress.tokens}
        return self.origin | trained | ({"best": progress.best} if progress.best else {})

    def summary(self, trainer: Trainer, counts: dict[str, int], parameters: int) -> dict[str, Any]:
        """The summary of a finished training. counts: the counts of its samples. parameters: the
        drafter's number of parameters."""
        progress = trainer.progress
        speed = progress.tokens / progress.seconds if progress.seconds else None
        return {
            "training": {
                "steps": progress.step,
                "tokens": progress.tokens,
                "training_seconds": progress.seconds,
                "tokens_per_second": speed,
                "history": progress.history,
                "dev": progress.dev,
                "best": progress.best,
                "clock": progress.clock,
                "steps_skipped": progress.skipped,
                "last_skipped": progress.last_skipped,
            },
            "samples": counts,
            "padding_share": trainer.padding_share(),
            "parameters": parameters,
            "trained_parameters": trainer.trained_parameters,
            "losses": self.config.losses,
        }

    @classmethod
    def show(cls, summary: dict[str, Any], number: int) -> ReportSection:
        """The training's figures, then the other figures, and the training's curves."""
        # Summaries of earlier versions lack some of these keys.
        others = dict(summary)
        training = dict(others.pop("training", None) or {})
        history, dev = (training.pop(key, None) or [] for key in ("history", "dev"))
        clock, best = training.pop("clock", None) or {}, training.pop("best", None)
        skipped = training.pop("last_skipped", None)
        if skipped:
            what = ", ".join(skipped["figures"])
            training["last skipped"] = f"step {skipped['step']}, {what} not finite"
        if best:
            training["best version"] = f"step {best['step']}, {best['figure']} {best['value']:.3f}"
        losses = loss_plot(f"loss-{number}", history, summary.get("losses") or [])
        return ReportSection(
            _in_short(history, dev, clock) | training | others,
            [
                StagePlot(f"loss-{number}", LOSS, losses),
                StagePlot(f"dev-{number}", DEV, agreement_plot(f"dev-{number}", dev)),
            ],
        )


def _in_short(
    history: list[dict[str, Any]], dev: list[dict[str, Any]], clock: dict[str, float]
) -> dict[str, str]:
    """The first and last loss, the last figures on the dev slice, and the time by activity."""
    figures = {}
    losses = [entry["loss"] for entry in history if entry.get("loss") is not None]
    if losses:
        figures["loss"] = f"{losses[0]:.3f} → {losses[-1]:.3f}"
    for name, value in (dev[-1] if dev else {}).items():
        if name != "step":
            figures[f"dev {name.replace('_', ' ')}"] = f"{value:.3f}"
    if clock:
        total = sum(clock.values())
        shares = sorted(clock.items(), key=lambda item: -item[1])
        figures["time in"] = ", ".join(f"{part} {format_share(t / total)}" for part, t in shares)
    return figures
