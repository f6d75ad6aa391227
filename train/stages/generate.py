"""`generate`: the target answers prompts, because drafters learn best from the target's text."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field, model_validator

from decode.artifact import verify_directory, write_directory
from decode.drafters import DRAFTERS
from decode.errors import UserError
from decode.loop import Decoder
from decode.sampling import Sampling
from decode.target.generation_config import nothing_filled_in, stated_config
from decode.target.loading import Target
from train.console import Bar
from train.data.chat import prompt_tokens
from train.data.corpus import PART, read_answers
from train.data.read import Example, spread
from train.schema import StageConfig
from train.stage import STAGES, Outcome, Stage, StageContext, StagePlan


class GenerateConfig(StageConfig):
    """split: the split whose prompts are answered. No stage trains on answers to the test split.
    prompts: the number of prompts, spread evenly over the split; None: all. samples: answers per
    prompt (they differ if temperature > 0). num_beams > 1: beam search by `transformers`
    `generate()`, for Blockwise distillation. part_prompts: the number of answers per saved part; a
    killed stage loses at most one part."""

    kind: Literal["generate"] = "generate"
    split: Literal["train", "dev", "test"] = "train"
    prompts: int | None = Field(None, ge=1)
    max_new_tokens: int = Field(128, ge=1)
    batch_size: int = Field(16, ge=1)
    temperature: float = Field(0.0, ge=0)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    samples: int = Field(1, ge=1)
    num_beams: int = Field(1, ge=1)
    part_prompts: int = Field(64, ge=1)
    seed: int = 0

    @model_validator(mode="after")
    def _fits(self) -> "GenerateConfig":
        if self.temperature == 0 and self.samples > 1:
            raise ValueError("samples > 1 needs a temperature > 0, or all answers are the same")
        if self.num_beams > 1 and self.temperature > 0:
            raise ValueError("beam search (num_beams > 1) goes with temperature 0")
        return self


@STAGES.register("generate")
class GenerateStage(Stage):
    """Writes part-0, part-1, …, each a directory with a file of one answer per line."""

    Config = GenerateConfig

    def plan(self, context: StageContext) -> StagePlan:
        settings: GenerateConfig = self.config
        count = len(self._jobs(context))
        return StagePlan(
            f"{count} answers of at most {settings.max_new_tokens} tokens",
            tokens=count * settings.max_new_tokens,
            memory_bytes=sum(
                p.numel() * p.element_size() for p in context.target.model.parameters()
            ),
        )

    def run(self, context: StageContext) -> Outcome:
        settings: GenerateConfig = self.config
        jobs = self._jobs(context)
        begin = time.perf_counter()
        parts = [
            jobs[i : i + settings.part_prompts] for i in range(0, len(jobs), settings.part_prompts)
        ]
        world, rank = context.accelerator.num_processes, context.accelerator.process_index
        made = 0
        with context.reporter.bar("generating", len(jobs)) as bar:
            for number, part in enumerate(parts):
                directory = context.directory / f"{PART}{number}"
                # Each rank writes complete parts without communication, so no rank waits.
                if number % world == rank and not _is_whole(directory):
                    made += self._make_part(context, part, directory, bar, number)
                bar.update(min((number + 1) * settings.part_prompts, len(jobs)))
        context.accelerator.wait_for_everyone()
        answers = read_answers(context.directory)
        tokens = sum(len(answer["tokens"]) for answer in answers)
        seconds = time.perf_counter() - begin
        ends = set(context.target.eos_token_ids)
        summary = {
            "prompts": len({answer["id"] for answer in answers}),
            "answers": len(answers),
            "tokens": tokens,
            "cut_at_limit": sum(answer["tokens"][-1] not in ends for answer in answers),
            "tokens_per_second": made / seconds if made else None,
        }
        context.reporter.say(
            f"  {len(answers)} answers, {tokens} tokens, {summary['cut_at_limit']} cut at "
            f"{settings.max_new_tokens} tokens"
        )
        return Outcome(summary=summary)

    def _jobs(self, context: StageContext) -> list[tuple[Example, int]]:
        """(example, sample number) in the order of answering."""
        settings: GenerateConfig = self.config
        if settings.split not in context.examples:
            raise UserError(
                f"stage {settings.name} answers split {settings.split}, which data lacks"
            )
        answerable = [e for e in context.examples[settings.split] if e.messages is not None]
        examples = spread(answerable, settings.prompts)
        if not examples:
            raise UserError(
                f"stage {settings.name}: the {settings.split} split has no prompts to answer, only "
                "text; give rows with prompt or messages"
            )
        return [(example, sample) for sample in range(settings.samples) for example in examples]

    def _make_part(
        self,
        context: StageContext,
        part: list[tuple[Example, int]],
        directory: Path,
        bar: Bar,
        number: int,
    ) -> int:
        settings: GenerateConfig = self.config
        prompts = [prompt_tokens(e, context.target.tokenizer, context.system) for e, _ in part]
        answers: list[list[int]] = [[] for _ in part]
        # Batch prompts of similar length: less padding in the prefill.
        order = sorted(range(len(part)), key=lambda i: len(prompts[i]))
        for first in range(0, len(order), settings.batch_size):
            batch = order[first : first + settings.batch_size]
            rows = [number * settings.part_prompts + i for i in batch]
            found = self._answer(context, [prompts[i] for i in batch], rows)
            for index, answer in zip(batch, found, strict=True):
                answers[index] = answer
            bar.update(number * settings.part_prompts + first + len(batch))
        lines = [
            json.dumps({"id": example.id, "sample": sample, "tokens": answer})
            for (example, sample), answer in zip(part, answers, strict=True)
        ]

        def fill(target: Path) -> None:
            (target / "answers.jsonl").write_text("\n".join(lines) + "\n")

        write_directory(directory, fill)
        return sum(len(answer) for answer in answers)

    def _answer(
        self, context: StageContext, prompts: list[list[int]], rows: Sequence[int]
    ) -> list[list[int]]:
        settings: GenerateConfig = self.config
        target = context.target
        if settings.num_beams > 1:
            return _beam_search(target, prompts, settings)
        decoder = Decoder(
            target.model,
            DRAFTERS["none"](),
            eos_token_ids=target.eos_token_ids,
            sampling=Sampling(settings.temperature, settings.top_k, settings.top_p),
        )
        done = decoder.decode(
            prompts, settings.max_new_tokens, seed=settings.seed, row_ids=list(rows)
        )
        return done.outputs


def _is_whole(directory: Path) -> bool:
    """Whether a part exists. Raises UserError (CorruptArtifact) if it exists but is damaged."""
    if not directory.exists():
        return False
    verify_directory(directory)
    return True


@torch.inference_mode()
def _beam_search(
    target: Target, prompts: list[list[int]], settings: GenerateConfig
) -> list[list[int]]:
    """The best beam for each prompt, computed by `transformers` on left-padded prompts."""
    eos = list(target.eos_token_ids)
    pad = target.tokenizer.pad_token_id
    pad = pad if pad is not None else (eos or [0])[0]
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad, device=target.device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt, device=target.device)
        mask[row, width - len(prompt) :] = 1
    given = stated_config(
        Sampling(),
        max_new_tokens=settings.max_new_tokens,
        eos_token_ids=eos,
        num_beams=settings.num_beams,
        pad_token_id=pad,
    )
    with nothing_filled_in(target.model):
        found = target.model.generate(ids, attention_mask=mask, generation_config=given)
    answers = []
    for row in found[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
        answers.append(row[:end])
    return answers
