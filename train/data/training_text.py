"""The texts that a drafter is trained on, in rounds: fixed, or written by the drafter itself."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.artifact import verify_directory, write_directory
from decode.drafters import DRAFTERS
from decode.loop import Decoder
from decode.target.loading import Target
from distill.trainable_model import Trainable
from train.data.batches import permutation
from train.data.chat import Sample
from train.data.corpus import Corpus
from train.data.read import Example
from train.schema import SamplingConfig, Strict

# Returns the complete trained parameters whose names begin with a prefix, on every rank. The prefix
# is removed from the names.
Weights = Callable[[str], dict[str, Tensor]]


class Text(Protocol):
    """Samples in rounds. A round is the same at every call, so training can resume.

    fixed: every round has the same samples, so a round is an epoch.
    """

    fixed: bool

    def round(self, number: int, weights: Weights) -> Sequence[Sample]:
        """The samples of round `number`, from 0. weights: returns the current weights of the
        training. All ranks must call `round` together."""
        ...


class FixedText:
    """The same samples in every round."""

    fixed = True

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def round(self, number: int, weights: Weights) -> Sequence[Sample]:
        return self._samples


Item = TypeVar("Item")


class OnPolicySampling(SamplingConfig):
    """As elsewhere, but at temperature 1 by default."""

    temperature: float = Field(1.0, ge=0)
    """Divides the logits. 0: greedy decoding."""


class OnPolicyConfig(Strict):
    """Text that the drafter generates during its training (GKD, 2306.13649)."""

    fraction: float = Field(0.5, gt=0, le=1)
    """λ, the share of samples that the drafter generates; the others come from the text."""
    samples: int = Field(128, ge=1)
    """The number of samples of a round. Each round generates new text with the current drafter."""
    max_new_tokens: int = Field(128, ge=1)
    """The length limit of a generated answer in tokens."""
    sampling: OnPolicySampling = OnPolicySampling()
    """How the text is drawn."""
    batch_size: int = Field(32, ge=1)
    """The number of prompts that a process answers together."""
    drafter: Literal["auto", "none", "ngram"] = "auto"
    """What speeds up the generation: nothing, ngram (speculative decoding), or auto, whichever is
    faster on the first batch. It does not change the text."""


class OnPolicyText:
    """Rounds that mix samples of a fixed text with samples that the student generates.

    A round is written to `directory` before training uses it, so a killed training continues with
    the same round. Every rank generates its share with a complete copy of the student, even under
    engines that shard the student. So no rank waits for longer texts of another rank.
    """

    fixed = False

    def __init__(
        self,
        settings: OnPolicyConfig,
        student: Trainable,
        target: Target,
        corpus: Corpus,
        prompts: Sequence[Example],
        samples: Sequence[Sample],
        accelerator: Accelerator,
        directory: Path,
        *,
        seed: int,
    ) -> None:
        """prompts: the examples that the student answers. samples: the fixed text."""
        self.settings, self.seed = settings, seed
        self.student, self.target, self.accelerator = student, target, accelerator
        self.corpus, self.prompts, self.samples = corpus, prompts, samples
        self.directory = directory
        self.drafter: str | None = None if settings.drafter == "auto" else settings.drafter

    def round(self, number: int, weights: Weights) -> Sequence[Sample]:
        """See `train.data.training_text.Text`. Generates the round unless it already exists."""
        path = self.directory / f"round-{number}"
        if not path.exists():
            written = self._write(number, weights)
            if self.accelerator.is_main_process:
                write_directory(path, lambda tmp: _store(tmp, written))
            self.accelerator.wait_for_everyone()
        verify_directory(path)
        lines = (path / "samples.jsonl").read_text().splitlines()
        generated = [Sample(**json.loads(line)) for line in lines]
        others = self.settings.samples - len(generated)
        return generated + _dealt(self.samples, others, number, f"{self.seed} text")

    def _write(self, number: int, weights: Weights) -> list[Sample]:
        settings, accelerator = self.settings, self.accelerator
        count = max(1, round(settings.fraction * settings.samples))
        examples = _dealt(self.prompts, count, number, f"{self.seed} prompts")
        rank, world = accelerator.process_index, accelerator.num_processes
        model, vocabulary = self.student.plain(weights("student."))
        if vocabulary is not None:
            _restore_vocabulary(model, vocabulary.ids)
        _mask_padding(model, self.target.token_count)
        model.to(accelerator.device, self.target.dtype)
        indices = range(rank, count, world)
        prompts = self.corpus.prompts(examples[index] for index in indices)
        # Batch prompts of similar length: less padding in the prefill.
        share = sorted(zip(indices, prompts, strict=True), key=lambda item: len(item[1]))
        size = settings.batch_size
        batches = [share[i : i + size] for i in range(0, len(share), size)]
        written: list[tuple[int, Sample]] = []
        if self.drafter is None:
            self.drafter = self._faster(model, batches[0] if batches else [], number)
        for batch in batches:
            answers = self._decode(model, batch, number, self.drafter)
            for (index, prompt), answer in zip(batch, answers, strict=True):
                name = f"{examples[index].id}#round-{number}-{index}"
                mask = [False] * len(prompt) + [True] * len(answer)
                written.append((index, Sample(name, prompt + answer, mask)))
        return [sample for _, sample in sorted(gather_object(written))]

    def _decode(
        self, model: PreTrainedModel, batch: list[tuple[int, list[int]]], number: int, drafter: str
    ) -> list[list[int]]:
        settings = self.settings
        decoder = Decoder(
            model,
            DRAFTERS[drafter](),
            eos_token_ids=self.target.eos_token_ids,
            # With this rule the text does not depend on the draft tokens.
            rule="exact",
            sampling=settings.sampling.build(),
        )
        rows = [number * settings.samples + index for index, _ in batch]
        prompts = [prompt for _, prompt in batch]
        return decoder.decode(
            prompts, settings.max_new_tokens, seed=self.seed, row_ids=rows
        ).outputs

    def _faster(
        self, model: PreTrainedModel, batch: list[tuple[int, list[int]]], number: int
    ) -> str:
        """The drafter that is faster on the first batch, measured by the main process for all."""
        seconds = {}
        if self.accelerator.is_main_process:
            for drafter in ("none", "ngram"):
                begin = time.perf_counter()
                self._decode(model, batch, number, drafter)
                seconds[drafter] = time.perf_counter() - begin
        choice = [min(seconds, key=lambda name: seconds[name]) if seconds else ""]
        broadcast_object_list(choice)
        return choice[0]


def _dealt(items: Sequence[Item], count: int, number: int, key: str) -> list[Item]:
    """`count` items for round `number`. Rounds go through all items in a shuffled order, then again
    in another order."""
    dealt: list[Item] = []
    first = number * count
    while len(dealt) < count:
        cycle, begin = divmod(first + len(dealt), len(items))
        order = permutation(len(items), f"{key} {cycle}")
        dealt += [items[i] for i in order[begin : begin + count - len(dealt)]]
    return dealt


def _restore_vocabulary(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Replace a reduced output layer by one over all tokens, with logits of −∞ for the others."""
    reduced = model.get_output_embeddings()
    size = model.config.get_text_config().vocab_size
    full = nn.Linear(reduced.in_features, size, dtype=reduced.weight.dtype)
    with torch.no_grad():
        full.weight.zero_()
        full.bias.fill_(-torch.inf)
        full.weight[ids.cpu()] = reduced.weight
        full.bias[ids.cpu()] = 0.0 if reduced.bias is None else reduced.bias
    model.set_output_embeddings(full.requires_grad_(False))


def _mask_padding(model: PreTrainedModel, tokens: int) -> None:
    """Mask the output rows from `tokens` on with logits of −∞. They are not tokens, and the target
    may have no embedding for them."""
    output = model.get_output_embeddings()
    if len(output.weight) <= tokens:
        return
    bias = output.weight.new_zeros(len(output.weight)) if output.bias is None else output.bias
    bias = bias.detach().clone()
    bias[tokens:] = -torch.inf
    output.bias = nn.Parameter(bias, requires_grad=False)


def _store(path: Path, samples: Sequence[Sample]) -> None:
    lines = [json.dumps(asdict(sample)) for sample in samples]
    (path / "samples.jsonl").write_text("".join(line + "\n" for line in lines))
