"""transformers' assisted generation, in this process."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import transformers
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from decode.base.device import dtype_name
from decode.draw.sampling import Sampling
from decode.model.generation_config import nothing_filled_in, stated_config
from decode.model.loading import load_model_and_tokenizer
from draftsmith.export.engines import ENGINES, Counting, Engine, EngineRun, EngineTask


class Transformers(Engine):
    """Every draft has γ tokens; stopping by confidence is off."""

    formats = ("hf",)
    install = "make install"
    counting = Counting(first_drafted=True, stops_at_eos=True)
    # Passes over one token and over several add in a different order, in float32.
    rounding = 4 * torch.finfo(torch.float32).eps

    def run(self, task: EngineTask) -> EngineRun:
        target = task.target
        dtype = dtype_name(target.dtype)
        assistant = load_model_and_tokenizer(
            str(task.export), dtype=dtype, device=str(target.device)
        ).model
        settings = assistant.generation_config
        settings.num_assistant_tokens = task.gamma
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0
        plain, plain_seconds = _generate(task, None)
        with _recorded_drafts() as drafts:
            drafted, drafted_seconds = _generate(task, assistant, drafts)
        counts = [
            _count(draft, len(prompt), text, last=number == len(text_drafts) - 1)
            for prompt, text, text_drafts in zip(task.prompts, drafted, drafts, strict=True)
            for number, draft in enumerate(text_drafts)
        ]
        return EngineRun(
            transformers.__version__,
            plain,
            drafted,
            sum(drafted for drafted, _ in counts),
            sum(accepted for _, accepted in counts),
            plain_seconds,
            drafted_seconds,
        )


ENGINES.register("transformers")(Transformers())

Drafts = list[list[tuple[int, list[int]]]]  # for each text: (start of the draft, its tokens)


def _generate(
    task: EngineTask, assistant: PreTrainedModel | None, drafts: Drafts | None = None
) -> tuple[list[list[int]], float]:
    # Greedy like our loop, whatever the checkpoint's generation_config says.
    settings = stated_config(
        Sampling(),
        max_new_tokens=task.max_new_tokens,
        eos_token_ids=task.target.eos_token_ids,
    )
    texts = []
    begin = time.perf_counter()
    for prompt in task.prompts:
        if drafts is not None:
            drafts.append([])
        ids = torch.tensor([list(prompt)], device=task.target.device)
        with torch.inference_mode(), nothing_filled_in(task.target.model):
            output = task.target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=settings,
                assistant_model=assistant,
            )
        texts.append(output[0, len(prompt) :].tolist())
    return texts, time.perf_counter() - begin


@contextmanager
def _recorded_drafts() -> Iterator[Drafts]:
    """Record every draft, because transformers counts none itself. The caller appends a list before
    each text."""
    drafts: Drafts = []
    original = AssistedCandidateGenerator.get_candidates

    def recording(self, input_ids, **options):  # type: ignore[no-untyped-def]
        candidates = original(self, input_ids, **options)
        begin = input_ids.shape[1]
        drafts[-1].append((begin, candidates[0][0, begin:].tolist()))
        return candidates

    AssistedCandidateGenerator.get_candidates = recording
    try:
        yield drafts
    finally:
        AssistedCandidateGenerator.get_candidates = original


def _count(
    draft: tuple[int, list[int]], prompt: int, text: list[int], last: bool
) -> tuple[int, int]:
    """Count the drafted and accepted tokens of a draft. last: the text's last draft, counted only
    up to the end of the text."""
    begin, tokens = draft
    following = text[begin - prompt :]
    within = tokens[: len(following)] if last else tokens
    accepted = 0
    for drafted, correct in zip(within, following, strict=False):
        if drafted != correct:
            break
        accepted += 1
    return len(within), accepted
