"""Measures a drafter during its training, on a slice of the dev split."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.loop.decoding import Decoder
from decode.model.loading import Target
from decode.stats import Counts
from train.data.batches import Batches, Inputs, RankText, collate, inputs
from train.data.chat_tokens import Sample
from train.data.corpus import Corpus
from train.data.read import spread
from train.data.training_text import Weights
from train.measure.ranks import Ranks
from train.settings.training import DevConfig


def require_dev_text(settings: DevConfig, corpus: Corpus, *, stage: str) -> None:
    """Raise UserError before the first stage if a `DevSlice` could not be made, as far as its text
    exists by then."""
    if settings.text == "data":
        _samples(settings, corpus, stage)
    _prompts(settings, corpus)


def _samples(settings: DevConfig, corpus: Corpus, stage: str) -> list[Sample]:
    """The samples with response tokens."""
    if settings.text == "data" and "dev" not in corpus.examples:
        raise UserError(
            f"stage {stage} has dev figures, but data has no dev split; set data.dev, or leave "
            "dev out"
        )
    samples = [s for s in corpus.samples(settings.text, "dev") if any(s.mask)]
    if not samples:
        raise UserError(
            f"stage {stage}: dev.text {settings.text} has no response tokens; add a generate "
            "stage that answers the dev split, and name it there"
        )
    return samples


def _prompts(settings: DevConfig, corpus: Corpus) -> list[list[int]]:
    """The prompts that are decoded."""
    if not settings.decode_prompts:
        return []
    return corpus.prompts(spread(corpus.asked("dev"), settings.decode_prompts))


@dataclass
class DevJudging:
    """How one kind of drafter is measured during its training.

    sums: returns float64 sums for a batch of samples. Batches and ranks add up. figures: computes
    the figures from the total sums. prefix: the prefix of the drafter's weights in the module.
    make_drafter: builds the drafter from these weights on the target's device. It returns the
    drafter and its target, which may be trained too.
    """

    sums: Callable[[nn.Module, Inputs, Sequence[str]], Tensor]
    figures: Callable[[Tensor], dict[str, float]]
    prefix: str
    make_drafter: Callable[[dict[str, Tensor]], tuple[Target, Drafter]]


class DevSlice:
    """Computes the figures of a `DevJudging` on a slice of the dev split, and optionally the
    acceptance rate.

    Raises UserError if there is no dev split, if its text has no response tokens, or if a prompt to
    decode does not fit into the target's context.
    """

    def __init__(
        self,
        settings: DevConfig,
        judging: DevJudging,
        target: Target,
        corpus: Corpus,
        accelerator: Accelerator,
        *,
        stage: str,
    ) -> None:
        """stage: the stage's name, for messages."""
        samples = _samples(settings, corpus, stage)
        self.settings, self.judging = settings, judging
        self.target, self.accelerator = target, accelerator
        self.samples = spread(samples, settings.samples)
        self.batches = Batches(
            [len(sample.tokens) for sample in self.samples], tokens_per_batch=2048, seed=0, epoch=0
        )
        self.prompts = _prompts(settings, corpus)

    @torch.no_grad()
    def measure(self, module: nn.Module, weights: Weights) -> dict[str, float]:
        """The figures, and `acceptance_rate` if prompts are decoded. Every rank must call this.
        The module must be in eval mode."""
        accelerator = self.accelerator
        rank, world = accelerator.process_index, accelerator.num_processes
        text = RankText(0, self.samples, self.batches, rank, world)
        sums: list[Tensor] = []
        for number in range(len(text)):
            batch = collate(text.batch(number), self.target.tokenizer.pad_token_id or 0)
            tensors = inputs(batch, accelerator.device)
            sums.append(self.judging.sums(module, tensors, batch["ids"]))
        figures = self.judging.figures(accelerator.reduce(torch.stack(sums).sum(0)))
        if self.prompts:
            figures["acceptance_rate"] = self._decode(weights)
        return figures

    def _decode(self, weights: Weights) -> float:
        """The acceptance rate of real decoding. Each rank decodes a share of the prompts."""
        gathered = weights(self.judging.prefix)
        ranks = Ranks.of(self.accelerator)
        counts = Counts.zero()
        if prompts := ranks.own(self.prompts):
            target, drafter = self.judging.make_drafter(gathered)
            decoder = Decoder(
                target.model, drafter, eos_token_ids=target.eos_token_ids, gamma=self.settings.gamma
            )
            counts = decoder.decode(prompts, self.settings.max_new_tokens).counts
        return sum(ranks.gather(counts), Counts.zero()).acceptance_rate
