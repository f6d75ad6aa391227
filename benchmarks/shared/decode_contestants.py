"""The decoding loops that `benchmarks.decode` compares, each as a call: prompts in, new tokens out.

All of them decode the same two modules, a target and a drafter, without an end-of-text token, so
all emit the same number of tokens. A contestant that does not support a setting raises `Unable`,
and the benchmark reports it. Any other error ends the benchmark with an error status.
`Passes` has the passes of a loop, reported by the loop or observed from outside.
"""

import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from benchmarks.common import Unable
from benchmarks.shared.llama_cpp import program, quantised, server_command, write_target
from decode.base.errors import UserError
from decode.drafters import DRAFTERS, Drafter
from decode.drafters.lookup.ngram import NgramDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.model.cache_names import given_cache
from decode.model.forward.prepare_model import can_pack, packed_copy
from decode.model.generation_config import nothing_filled_in
from decode.model.loading import Target
from decode.opening.directory import open_drafter
from draftsmith.export.formats.gguf_layout import FILE
from train.engines.child_process import Server, serving
from train.engines.counters import DraftCounts, counts_beside

MAX_N = 3  # the longest n-gram that every prompt lookup tries
LLAMA_CONTEXT = 4096  # tokens of a text that llama.cpp has memory for

NAMES = {
    "plain": "ours, plain",
    "speculative": "ours, drafter",
    "lookup": "ours, prompt lookup",
    "heads": "ours, lookup and heads",
    "generate": "transformers generate()",
    "generate_packed": "generate() on packed weights",
    "assisted": "transformers, drafter, constant γ",
    "assisted_defaults": "transformers, drafter, its defaults",
    "transformers_lookup": "transformers, prompt lookup",
    "llama": "llama.cpp, plain",
    "llama_q8": "llama.cpp, plain, Q8_0",
    "llama_q4": "llama.cpp, plain, Q4_0",
    "llama_drafter": "llama.cpp, drafter",
    "llama_lookup": "llama.cpp, prompt lookup",
}


@dataclass
class Passes:
    """The target's passes over one job. If a loop runs the prompt in a separate pass, that pass and
    its token do not count.

    steps, emitted, drafted, reached, accepted: as in `decode.stats`, over all rows. The times are
    in seconds, one value per pass, or empty if they cannot be measured. draft_s: drafting (for
    other loops: the drafter's forwards). verify_s: the target's forward. overhead_s: the rest.
    """

    steps: int = 0
    emitted: int = 0
    drafted: int = 0
    reached: int = 0
    accepted: int = 0
    draft_s: list[float] = field(default_factory=list)
    verify_s: list[float] = field(default_factory=list)
    overhead_s: list[float] = field(default_factory=list)

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(
            *(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True))
        )


class Watch:
    """Records the start, the end and the input sizes of a target's and a drafter's forwards.

    On a GPU the hooks would only see kernel launches, so it gives no times there.
    """

    def __init__(self, timed: bool) -> None:
        self._timed = timed
        self.inputs: list[tuple[int, int]] = []  # the target's: (length of the past, input tokens)
        self.target_spans: list[list[float]] = []  # the target's
        self.drafter_spans: list[list[float]] = []  # the drafter's

    def times(self) -> Passes:
        """Return draft_s, verify_s and overhead_s of `Passes`, without the prompt's pass."""
        drafts, verify, overhead = [], [], []
        for before, span in pairwise(self.target_spans) if self._timed else ():
            gap = [before[1], span[0]]
            inside = [end - begin for begin, end in self.drafter_spans if gap[0] <= begin < gap[1]]
            drafts.append(sum(inside))
            verify.append(span[1] - span[0])
            overhead.append(gap[1] - gap[0] - drafts[-1])
        return Passes(draft_s=drafts, verify_s=verify, overhead_s=overhead)

    def passes(self, width: int, tokens: int, *, rows: int, drafts: bool) -> Passes:
        """Return the passes of `generate()`. width: tokens of each prompt. tokens: new tokens."""
        steps = len(self.inputs)
        if not drafts:  # the prompt has a separate pass
            return self.times() + Passes(rows * (steps - 1), rows * (tokens - 1))
        last = [width - 1, *(past for past, _ in self.inputs[1:]), width + tokens - 1]
        drafted = [self.inputs[0][1] - width, *(fed - 1 for _, fed in self.inputs[1:])]
        accepted = [b - a - 1 for a, b in pairwise(last)]
        reached = sum(min(d, a + 1) for d, a in zip(drafted, accepted, strict=True))
        counts = Passes(steps, tokens, sum(drafted), reached, sum(accepted))
        return self.times() + counts


@contextmanager
def watched(target: PreTrainedModel, drafter: PreTrainedModel | None) -> Iterator[Watch]:
    """Watch the two modules inside a `with` block."""
    watch = Watch(timed=target.device.type == "cpu")

    def begin(spans: list[list[float]]) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if spans is watch.target_spans:
                past = given_cache(kwargs)
                ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
                watch.inputs.append(
                    (past.get_seq_length() if past is not None else 0, ids.shape[1])
                )
            spans.append([time.perf_counter(), 0.0])

        return hook

    def end(spans: list[list[float]]) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            spans[-1][1] = time.perf_counter()

        return hook

    hooks = []
    for model, spans in ((target, watch.target_spans), (drafter, watch.drafter_spans)):
        if model is not None:
            hooks.append(model.register_forward_pre_hook(begin(spans), with_kwargs=True))
            hooks.append(model.register_forward_hook(end(spans)))
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class JobResult:
    """The result of a contestant for one job: new tokens by row, and a function that counts its
    passes. The benchmark calls the function after the clock has stopped."""

    outputs: list[list[int]]
    passes: Callable[[], Passes]


Prompts = Sequence[Sequence[int]]
Contestant = Callable[[Prompts, int, int], JobResult]  # prompts, new tokens for each, seed
Maker = Callable[[], Contestant]


@dataclass
class Models:
    """The models that all contestants decode. Their generation configs are dropped.

    assistant: the drafter's model. heads: a drafter that only our loop can use, or "" for none.
    closing: closes what contestants have opened.
    """

    target: Target
    assistant: PreTrainedModel
    heads: str = ""
    closing: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        pad = self.target.tokenizer.pad_token_id
        for model in (self.target.model, self.assistant):
            model.generation_config = GenerationConfig(pad_token_id=0 if pad is None else pad)

    @classmethod
    def load(cls, target: Target, drafter: str, heads: str = "") -> "Models":
        """Raises UserError for a drafter that only our loop can use."""
        opened = open_drafter(drafter, target)
        # Subclasses draft in another way, which other loops do not have.
        if type(opened) is not SmallLMDrafter or opened.vocabulary is not None:
            raise UserError(
                f"drafter {drafter} is not a small language model with the target's full "
                "vocabulary, and other decoding loops need one; leave --drafter out to have one "
                "trained"
            )
        return cls(target, opened.lm.model, heads)


def makers(models: Models, *, gamma: int, sampled: bool, batch: int = 1) -> dict[str, Maker]:
    """Return, for every name in NAMES, a function that makes the contestant ready to run.

    sampled: at temperature 1 from the full distribution, the only setting that all loops support.
    """
    sampling = Sampling(1.0 if sampled else 0.0)

    def ours(drafter: Callable[[], Drafter]) -> Maker:
        return lambda: _ours(
            Decoder(models.target.model, drafter(), gamma=gamma, sampling=sampling)
        )

    lookup = {"prompt_lookup_num_tokens": gamma, "max_matching_ngram_size": MAX_N}
    constant = {
        "num_assistant_tokens": gamma,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    model = models.target.model

    def heads() -> Drafter:
        if not models.heads:
            raise Unable("no heads are given (--heads)")
        return open_drafter(models.heads, models.target)

    return {
        "plain": ours(DRAFTERS["none"]),
        "speculative": ours(lambda: SmallLMDrafter(models.assistant)),
        "lookup": ours(lambda: NgramDrafter(max_n=MAX_N)),
        "heads": ours(heads),
        "generate": lambda: _transformers(model, sampled),
        "generate_packed": lambda: _transformers(_pack(model), sampled),
        "assisted": lambda: _transformers(model, sampled, models.assistant, constant),
        "assisted_defaults": lambda: _transformers(model, sampled, models.assistant, {}),
        "transformers_lookup": lambda: _transformers(model, sampled, None, lookup),
        **_llama(models, gamma, sampled or batch > 1),
    }


def _ours(decoder: Decoder) -> Contestant:
    def run(prompts: Prompts, tokens: int, seed: int) -> JobResult:
        decoded = decoder.decode(prompts, tokens, seed=seed)

        def passes() -> Passes:
            counts = decoded.counts
            return Passes(
                counts.steps,
                counts.emitted,
                int(counts.drafted.sum()),
                int(counts.reached.sum()),
                int(counts.accepted.sum()),
                [step.draft_s for step in decoded.steps],
                [step.verify_s for step in decoded.steps],
                [step.overhead_s for step in decoded.steps],
            )

        return JobResult(decoded.outputs, passes)

    return run


def _pack(model: PreTrainedModel) -> PreTrainedModel:
    if not can_pack(model):
        raise Unable("these weights are not packed on this device")
    return packed_copy(model)


def _transformers(
    model: PreTrainedModel,
    sampled: bool,
    assistant: PreTrainedModel | None = None,
    drafting: dict[str, Any] | None = None,
) -> Contestant:
    """Return `generate()` as a contestant. drafting: None without drafts, else their settings, for
    the assistant if there is one."""
    pad = model.generation_config.pad_token_id
    sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sampled else {}
    lookup = drafting if assistant is None and drafting else {}

    def run(prompts: Prompts, tokens: int, seed: int) -> JobResult:
        if drafting is not None and len(prompts) > 1:
            raise Unable("it drafts for a batch of 1 only")
        settings = GenerationConfig(
            max_new_tokens=tokens, do_sample=sampled, pad_token_id=pad, **sampling, **lookup
        )
        if assistant is not None:
            # A new config for each job, because generate() stores adapted values in it.
            assistant.generation_config = GenerationConfig(pad_token_id=pad, **(drafting or {}))
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), pad)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        torch.manual_seed(seed)
        with nothing_filled_in(model), watched(model, assistant) as watch:
            texts = model.generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                assistant_model=assistant,
                generation_config=settings,
            )
        outputs = texts[:, width:].tolist()
        drafts, rows = drafting is not None, len(outputs)
        return JobResult(outputs, lambda: watch.passes(width, tokens, rows=rows, drafts=drafts))

    return run


def _llama(models: Models, gamma: int, others: bool) -> dict[str, Maker]:
    """llama.cpp's contestants: the target's own weights, and in fewer bits, plain and with its
    drafts. A time is that of one request over loopback, which adds about two milliseconds. others:
    the setting is one of those that are not compared."""
    file = functools.cache(functools.partial(_written, models))

    def drafter() -> list[str]:
        return [
            *("--spec-type", "draft-simple", "--spec-draft-p-min", "0"),
            *("--spec-draft-n-max", str(gamma), "-md", str(file("drafter"))),
        ]

    def lookup() -> list[str]:
        return [
            *("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(MAX_N)),
            *("--spec-ngram-simple-size-m", str(gamma)),
        ]

    def contestant(kind: str, drafts: Callable[[], list[str]]) -> Contestant:
        if others:
            raise Unable("it is compared in greedy decoding at batch 1 only")
        command = server_command(file(kind), rows=1, context=LLAMA_CONTEXT)
        command += [*drafts(), "--port", "{port}"]
        server = models.closing.enter_context(serving("llama-server", command, "/health"))
        return functools.partial(_llama_answer, server)

    return {
        "llama": lambda: contestant("target", list),
        "llama_q8": lambda: contestant("Q8_0", list),
        "llama_q4": lambda: contestant("Q4_0", list),
        "llama_drafter": lambda: contestant("target", drafter),
        "llama_lookup": lambda: contestant("target", lookup),
    }


def _llama_answer(server: Server, prompts: Prompts, tokens: int, seed: int) -> JobResult:
    (prompt,) = prompts
    settings = {"temperature": 0, "top_k": 1, "cache_prompt": False, "ignore_eos": True}
    body = {"prompt": list(prompt), "n_predict": tokens, "return_tokens": True, **settings}
    answer = server.ask("/completion", body)
    if not isinstance(answer, dict) or len(answer.get("tokens", ())) != tokens:
        raise UserError(f"llama-server answers {json.dumps(answer)[:200]}; asked: {tokens} tokens")
    counts = counts_beside(answer) or DraftCounts()
    drafted, accepted = int(counts.drafted), int(counts.accepted)
    emitted = tokens - 1  # the prompt's pass gives the first
    passes = Passes(emitted - accepted, emitted, drafted, 0, accepted)
    return JobResult([answer["tokens"]], lambda: passes)


def _written(models: Models, kind: str) -> Path:
    """A GGUF file of the target, of the drafter, or of the target in a quantised type. Raises
    Unable without llama.cpp, and for a target that cannot be written as GGUF."""
    program()  # before a file is written
    folder = Path(models.closing.enter_context(tempfile.TemporaryDirectory()))
    model = models.assistant if kind == "drafter" else models.target.model
    write_target(folder, model, models.target.name)
    if kind in ("target", "drafter"):
        return folder / FILE
    return quantised(folder / FILE, kind)
