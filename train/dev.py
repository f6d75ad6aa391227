"""Figures about a drafter while it is trained, on a slice of the dev split."""

from collections.abc import Sequence
from dataclasses import asdict

import torch
from accelerate.utils import broadcast_object_list
from pydantic import Field
from torch import nn

from decode.drafters.small_lm import SmallLMDrafter
from decode.loop import Decoder
from distill.agreement import Agreement
from distill.lora import Trainable
from distill.teacher import LiveTeacher
from train.data.batches import Batches, collate, inputs
from train.data.chat import Sample, prompt_tokens
from train.data.read import spread
from train.schema import Strict
from train.stage import StageContext
from train.text import Weights


class DevConfig(Strict):
    """text: a generate stage that answered the dev split, or `data` for its own responses.

    samples: of it, spread evenly. every: optimizer steps between two looks. decode_prompts: so
    many dev prompts are decoded as well each time, for the acceptance that the loop really has
    (greedy, at this γ); 0: none.
    """

    text: str = "data"
    samples: int = Field(32, ge=1)
    every: int = Field(50, ge=1)
    decode_prompts: int = Field(0, ge=0)
    gamma: int = Field(4, ge=1)
    max_new_tokens: int = Field(48, ge=2)


class DevSlice:
    """Measures agreement with the target, and on request acceptance, of a `Distillation`."""

    def __init__(
        self,
        settings: DevConfig,
        context: StageContext,
        samples: Sequence[Sample],
        student: Trainable,
        teacher: LiveTeacher,
    ) -> None:
        """teacher: the target over its whole vocabulary."""
        self.settings, self.context = settings, context
        self.samples = spread(samples, settings.samples)
        self.student, self.teacher = student, teacher
        self.batches = Batches(
            [len(sample.tokens) for sample in self.samples], tokens_per_batch=2048, seed=0, epoch=0
        )
        prompts = spread(context.examples.get("dev", []), settings.decode_prompts)
        self.prompts = [prompt_tokens(e, context.target.tokenizer, context.system) for e in prompts]

    @torch.no_grad()
    def measure(self, module: nn.Module, weights: Weights) -> dict[str, float]:
        """`Agreement`'s figures, and `acceptance_rate` when prompts are decoded. All ranks must
        call it; the module is in eval mode."""
        accelerator = self.context.accelerator
        mine = self.batches.for_rank(accelerator.process_index, accelerator.num_processes)
        sums = torch.zeros(4, dtype=torch.float64, device=accelerator.device)
        pad_id = self.context.target.tokenizer.pad_token_id or 0
        for number in range(len(mine)):
            batch = collate([self.samples[i] for i in mine.batch(number)], pad_id)
            given = inputs(batch, accelerator.device)
            teacher = self.teacher.signal(**given, ids=batch["ids"])
            sums += module(**given, agreement_with=teacher)[1]
        found = asdict(Agreement.from_sums(accelerator.reduce(sums)))
        if self.prompts:
            found["acceptance_rate"] = self._decode(weights)
        return found

    def _decode(self, weights: Weights) -> float:
        """The loop's acceptance rate, measured by the main process."""
        target, accelerator = self.context.target, self.context.accelerator
        gathered = weights("student.")
        rate = [0.0]
        if accelerator.is_main_process:
            model, vocabulary = self.student.plain(gathered)
            model.to(target.device, target.dtype)
            ids = None if vocabulary is None else vocabulary.ids.to(target.device)
            decoder = Decoder(
                target.model,
                SmallLMDrafter(model, ids),
                eos_token_ids=target.eos_token_ids,
                gamma=self.settings.gamma,
            )
            done = decoder.decode(self.prompts, self.settings.max_new_tokens)
            rate = [done.counts.acceptance_rate]
        broadcast_object_list(rate)
        return rate[0]
