"""The decoding loops that `benchmarks.decode` compares, each as a call: prompts in, new tokens out.

All of them decode the same two modules, a target and a drafter, without an end-of-text token, so
all emit the same number of tokens. A contestant that does not support a setting raises `Unable`,
and the benchmark reports it. Any other error ends the benchmark with an error status.
`Passes` has the passes of a loop, reported by the
loop or observed from outside.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from benchmarks.common import Unable
from benchmarks.shared.llama_contestants import Answers, llama_answers
from benchmarks.shared.openvino_contestants import openvino_answers
from decode.base.device import dtype_name
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

MAX_N = 3  # the longest n-gram that every prompt lookup tries

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
    "flashspec": "flashspec, drafter",
    "flashspec_lookup": "flashspec, prompt lookup",
    "economize": "economize, drafter",
    "economize_lookup": "economize, prompt lookup",
    "llama": "llama.cpp, plain",
    "llama_q8": "llama.cpp, plain, Q8_0",
    "llama_q4": "llama.cpp, plain, Q4_0",
    "llama_drafter": "llama.cpp, drafter",
    "llama_lookup": "llama.cpp, prompt lookup",
    "openvino": "OpenVINO, plain",
    "openvino_drafter": "OpenVINO, drafter",
    "openvino_lookup": "OpenVINO, prompt lookup",
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

    assistant: the drafter's model. drafter_path: the drafter's directory, for packages that only
    load a drafter themselves. heads: a drafter that only our loop can use, or "" for none. closing:
    closes what contestants have opened.
    """

    target: Target
    assistant: PreTrainedModel
    drafter_path: str
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
        return cls(target, opened.lm.model, drafter, heads)


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
        "flashspec": lambda: _flashspec(models, gamma, sampled, lookup=False),
        "flashspec_lookup": lambda: _flashspec(models, gamma, sampled, lookup=True),
        "economize": lambda: _economize(models, gamma, sampled, lookup=False),
        "economize_lookup": lambda: _economize(models, gamma, sampled, lookup=True),
        **{
            name: partial(_engine, start, sampled or batch > 1)
            for answers in (llama_answers, openvino_answers)
            for name, start in answers(models, gamma, MAX_N).items()
        },
    }


def _engine(start: Callable[[], Answers], others: bool) -> Contestant:
    if others:
        raise Unable("it is compared in greedy decoding at batch 1 only")
    answer = start()

    def run(prompts: Prompts, tokens: int, seed: int) -> JobResult:
        (prompt,) = prompts
        found = answer(prompt, tokens)
        emitted = tokens - 1  # the prompt's pass gives the first
        counts = Passes(emitted - found.accepted, emitted, found.drafted, 0, found.accepted)
        return JobResult([found.tokens], lambda: counts)

    return run


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


def _flashspec(models: Models, gamma: int, sampled: bool, *, lookup: bool) -> Contestant:
    import flashspec
    from flashspec.engine import HuggingFaceDrafter, NgramDrafter, TargetModel

    logging.getLogger("flashspec").setLevel(logging.ERROR)
    target, device = models.target, models.target.device
    temperature = 1.0 if sampled else 0.0
    drafter = (
        NgramDrafter(max_ngram=MAX_N)
        if lookup
        else HuggingFaceDrafter(
            models.drafter_path, device, target.dtype, temperature, model=models.assistant
        )
    )
    engine = flashspec.SpeculativeEngine(
        flashspec.FlashSpecConfig(
            device=str(device),
            dtype=dtype_name(target.dtype),
            # One drafter with one γ: "auto" would mix in prompt lookup and ignore γ.
            drafter_strategy="bandit",
            bandit=flashspec.BanditConfig(n_arms=1),
            sampling=flashspec.SamplingConfig(gamma=gamma, temperature=temperature, seed=0),
        ),
        [drafter],
        TargetModel(target.name, device, target.dtype, model=target.model),
    )

    def run(prompts: Prompts, tokens: int, seed: int) -> JobResult:
        if len({len(prompt) for prompt in prompts}) > 1:
            raise Unable("it supports only prompts of equal length, and no attention mask")
        ids = torch.tensor([list(prompt) for prompt in prompts], device=device)
        assistant = None if lookup else models.assistant
        with watched(target.model, assistant) as watch:
            result = engine.generate(ids, tokens)

        def passes() -> Passes:
            steps = result.arm_steps
            counts = Passes(
                len(steps),
                sum(step.emitted for step in steps),
                sum(step.proposed for step in steps),
                sum(min(step.proposed, step.accepted + 1) for step in steps),
                sum(step.accepted for step in steps),
            )
            return watch.times() + counts

        return JobResult(result.output_ids.tolist(), passes)

    return run


def _economize(models: Models, gamma: int, sampled: bool, *, lookup: bool) -> Contestant:
    import economize
    from economize.techniques.draft_model import DraftModelConfig
    from economize.techniques.lookup import LookupConfig

    logging.getLogger("economize").setLevel(logging.ERROR)
    technique = (
        LookupConfig(max_ngram=MAX_N) if lookup else DraftModelConfig(model=models.drafter_path)
    )
    decoding = economize.DecodeConfig(
        cycle_length=gamma + 1,  # its cycles include the target's own token
        verifier="rejection" if sampled else None,
        cuda_graphs=models.target.device.type == "cuda",
    )
    model = economize.apply(models.target.model, technique, decoding=decoding)

    def run(prompts: Prompts, tokens: int, seed: int) -> JobResult:
        ids = [torch.tensor(list(prompt), device=models.target.device) for prompt in prompts]
        selector = economize.TopPSampler(seed=seed) if sampled else None
        results = model.decode_batch(ids, tokens, selector=selector)

        def passes() -> Passes:
            cycles = [cycle for result in results for cycle in result.acceptance]
            exact = [e for result in results for e in result.cost.events if e.kind == "exact"]
            return Passes(
                len(exact) - len(results),
                sum(len(result.tokens) - 1 for result in results),
                sum(drafted for drafted, _ in cycles),
                sum(min(drafted, accepted + 1) for drafted, accepted in cycles),
                sum(accepted for _, accepted in cycles),
            )

        return JobResult([result.tokens.tolist() for result in results], passes)

    return run
