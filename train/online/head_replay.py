"""Heads that learn from their own drafts while they are trained (Draft-OPD, 2605.29343).

Every n steps the loop decodes prompts of the text with the heads in training. The verification
marks where they fail, and the next n steps replay these positions beside the text. Records, batches
and loss are those of an `online` stage.

Differs from the paper: a replayed draft ends at its first rejected token. In the paper the drafter
drafts on from there, and the target runs again over these drafts.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from pydantic import Field
from torch import Tensor, nn

from decode.base.artifact import remove_directory
from decode.base.strict import Strict
from decode.drafters import Drafter
from decode.draw.sampling_config import SamplingConfig
from decode.loop.decoding import Decoder
from decode.model.loading import Target
from distill.losses import WeightedLoss
from distill.replay.rejections import Collector
from distill.replay.replay_buffer import (
    Record,
    ReplayBuffer,
    bytes_per_draft,
    bytes_per_position,
    describe_heads,
)
from distill.teacher.top_k_cache import describe_teacher
from heads.online_heads import DraftLoss
from train.base.stage import Memory
from train.data.batches import Inputs
from train.data.corpus import Corpus
from train.data.read import Example
from train.data.stored_samples import StoredSamples
from train.data.training_text import dealt_out
from train.loop.estimates import decoding_memory, prompt_length
from train.loop.trainer import Clock, Trainer
from train.loop.training_task import LoopConfig, Step
from train.online.replayed_batches import replayed_batches

# (sums by name, predicted tokens) → figures
Figures = Callable[[dict[str, float], int], dict[str, float]]
ROUND = "round-"
TERMS = ("replay/loss", "replay/positions")


class ReplayConfig(Strict):
    """Drafts of the heads in training, which the target judged (Draft-OPD, 2605.29343)."""

    share: float = Field(0.5, gt=0, le=1)
    """The weight of a replayed position's mean loss. The text's has the rest."""
    every: int = Field(50, ge=1)
    """Optimizer steps between two decodings with the heads as they are then."""
    prompts: int = Field(32, ge=1)
    """The number of the text's prompts of a decoding, each time others."""
    batch_size: int = Field(32, ge=1)
    """The number of prompts that are decoded together."""
    max_new_tokens: int = Field(64, ge=2)
    """The length limit of an answer in tokens."""
    sampling: SamplingConfig = SamplingConfig()
    """How the answers are drawn."""
    accepted: float = Field(0.25, ge=0, le=1)
    """Also replay this share of the drafted tokens that were accepted."""
    k: int = Field(64, ge=1)
    """How many of the target's likeliest tokens are kept of each distribution."""
    tokens_per_batch: int = Field(512, ge=2)
    """Tokens of text that a batch of the training replays, padding included."""


class HeadReplay:
    """Decodes in rounds of `every` steps, and adds the loss on their records to that of the text.

    A round is written to `directory` before it is learnt from, so a training that was killed goes
    on with the same records.
    """

    trainer: Trainer

    def __init__(
        self,
        settings: ReplayConfig,
        loop: LoopConfig,
        drafts: DraftLoss,
        weighted_loss: WeightedLoss,
        target: Target,
        samples: StoredSamples,
        accelerator: Accelerator,
        directory: Path,
        make_drafter: Callable[[], Drafter],
        clock: Clock,
        *,
        max_length: int,
    ) -> None:
        """samples: the text, whose prompts are decoded. make_drafter: makes the drafter of the
        heads as they are now. max_length: of a text, in tokens.

        Raises UserError for a max_length that is too short for the deepest head.
        """
        self.settings, self.loop, self.drafts, self.target = settings, loop, drafts, target
        self.weighted_loss, self.accelerator, self.clock = weighted_loss, accelerator, clock
        self.directory, self.make_drafter = directory, make_drafter
        self.window = drafts.window(target, max_length)
        self.samples = samples
        self._round = self._step = -1
        self._used = 0  # batches, in the current step
        self._batches: list[list[Record]] = []

    @property
    def buffer(self) -> ReplayBuffer:
        """An empty buffer for the records of the current round."""
        ids, k = self.drafts.heads.vocabulary, self.settings.k
        made_with = describe_teacher(self.target, k=k, temperature=1.0, vocabulary=ids)
        made_with |= describe_heads(self.drafts.heads.depth, self.drafts.captured_layers)
        return ReplayBuffer(1 << 62, made_with, self.directory / f"{ROUND}{self._round}")

    def step_of(self, step: Step) -> Step:
        """`step`, and the replayed drafts. Two more sums: the loss of these, and their number."""

        def both(module: nn.Module, batch: Inputs, ids: Sequence[str]) -> tuple[Tensor, Tensor]:
            loss, sums = step(module, batch, ids)
            records = self._next()
            count = sum(len(record.positions) for record in records)
            replayed = loss.new_zeros(())
            if count:
                replayed = self._loss(records)
                share, tokens = self.settings.share, int(batch["loss_mask"].sum())
                loss = (1 - share) * loss + share * tokens / count * replayed
            return loss, torch.cat([sums, sums.new_tensor([float(replayed.detach()), count])])

        return both

    @staticmethod
    def figures_of(figures: Figures) -> Figures:
        """`figures`, and the mean loss of a replayed position, from the sums of a step."""

        def both(sums: dict[str, float], tokens: int) -> dict[str, float]:
            loss, count = (sums[name] for name in TERMS)
            return figures(sums, tokens) | ({TERMS[0]: loss / count} if count else {})

        return both

    def _loss(self, records: Sequence[Record]) -> Tensor:
        heads = self.drafts.heads
        training = heads.training
        heads.eval()  # without noise, as it was drafted
        with self.accelerator.autocast():
            loss, _ = self.drafts(records, self.weighted_loss)
        heads.train(training)
        return loss

    def _next(self) -> list[Record]:
        """The records for the next batch of the training; none if nothing was recorded."""
        step, every = self.trainer.progress.step, self.settings.every
        if step != self._step:
            self._step, self._used = step, 0
        accumulation = self.loop.accumulation
        if step // every != self._round:
            self._round = step // every
            with self.clock("replay"):
                records = self._records()
            self._batches = replayed_batches(
                records,
                0,
                steps=every * accumulation,
                tokens_per_batch=self.settings.tokens_per_batch,
                window=self.window,
                key=f"{self.loop.seed} {self._round}",
            )
        number = step % every * accumulation + self._used
        self._used += 1
        return self._batches[number] if self._batches else []

    def _records(self) -> list[Record]:
        """Those of the current round, stored or decoded now."""
        buffer = self.buffer
        buffer.restore(self.target)
        if not len(buffer):
            with torch.no_grad():
                buffer.add(self._decoded())
            buffer.commit()
        # What a checkpoint that is kept goes on with stays.
        loop, every = self.loop, self.settings.every
        reach = math.ceil(loop.save_every * (loop.keep_checkpoints + 1) / every) + 1
        for path in self.directory.glob(f"{ROUND}*"):
            if int(path.name.removeprefix(ROUND)) < self._round - reach:
                remove_directory(path)
        return list(buffer)

    def _decoded(self) -> list[Record]:
        settings, target, heads = self.settings, self.target, self.drafts.heads
        key = f"{self.loop.seed} replay"
        rows = dealt_out(range(len(self.samples)), settings.prompts, self._round, key)
        texts = ((s.tokens, s.mask) for s in self.samples.some(rows))
        # Texts without a prompt, or with one that leaves no room, are not continued.
        prompts = [tokens[: mask.index(True)] for tokens, mask in texts if True in mask]
        prompts = [prompt for prompt in prompts if 2 <= len(prompt) < self.window]
        if not prompts:
            return []
        drafter = self.make_drafter()
        numbers = [self._round * settings.prompts + i for i in range(len(prompts))]
        collector = Collector(
            settings.k,
            target.token_count,
            accepted=settings.accepted,
            vocabulary=heads.vocabulary,
            eos_token_ids=target.eos_token_ids,
            captured_layers=self.drafts.captured_layers,
            text_states=self.drafts.text_states(drafter),
            seed=self.loop.seed,
        )
        collector.begin(numbers)
        decoder = Decoder(
            target.model,
            drafter,
            eos_token_ids=target.eos_token_ids,
            gamma=heads.depth,
            sampling=settings.sampling.build(),
            observers=[collector],
        )
        decoder.decode(
            prompts,
            settings.max_new_tokens,
            seed=self.loop.seed,
            row_ids=numbers,
            batch_size=settings.batch_size,
        )
        collector.end()
        return sorted(collector.take()[0], key=lambda record: record.request)


def replay_memory(
    settings: ReplayConfig,
    drafts: DraftLoss,
    target: Target,
    corpus: Corpus,
    examples: Sequence[Example],
) -> Memory:
    """What a round takes beside the target's weights: its decoding and its records.

    examples: some of the training prompts.
    """
    prompt, new = prompt_length(corpus, examples), settings.max_new_tokens
    memory = decoding_memory(
        target,
        0,
        rows=min(settings.batch_size, settings.prompts),
        prompt=prompt,
        new=new,
        width=drafts.heads.depth + 1,
    )
    whole = drafts.whole_text
    state = bytes_per_draft(drafts.features, target.dtype, whole_text=whole)
    text = new * bytes_per_position(settings.k, target.token_count)
    text += state * (prompt + new if whole else new)
    return memory + Memory(states=settings.prompts * text)
