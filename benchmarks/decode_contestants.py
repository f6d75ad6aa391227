"""The decoding loops that `benchmarks.decode` compares, each as a call: prompts in, new tokens out.

All of them decode the same two modules, a target and a drafter, without an end-of-text token, so
all emit the same number of tokens. A contestant that does not support a setting raises its
package's error, and the benchmark reports it.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from benchmarks.decode_passes import Passes, watched
from decode.drafters import DRAFTERS, Drafter
from decode.drafters.directory import open_drafter
from decode.drafters.ngram import NgramDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.errors import UserError
from decode.loop import Decoder
from decode.sampling import Sampling
from decode.target.cpu_kernels import can_pack, packed_copy
from decode.target.generation_config import nothing_filled_in
from decode.target.loading import Target

MAX_N = 3  # the longest n-gram that every prompt lookup tries

NAMES = {
    "plain": "ours, plain",
    "speculative": "ours, drafter",
    "lookup": "ours, prompt lookup",
    "generate": "transformers generate()",
    "generate_packed": "generate() on packed weights",
    "assisted": "transformers, drafter, constant γ",
    "assisted_defaults": "transformers, drafter, its defaults",
    "transformers_lookup": "transformers, prompt lookup",
    "flashspec": "flashspec, drafter",
    "flashspec_lookup": "flashspec, prompt lookup",
    "economize": "economize, drafter",
    "economize_lookup": "economize, prompt lookup",
}


@dataclass
class Ran:
    """The result of a contestant for one job: new tokens by row, and a function that counts its
    passes. The benchmark calls the function after the clock has stopped."""

    outputs: list[list[int]]
    passes: Callable[[], Passes]


Prompts = Sequence[Sequence[int]]
Contestant = Callable[[Prompts, int, int], Ran]  # prompts, new tokens for each, seed
Maker = Callable[[], Contestant]


@dataclass
class Models:
    """The models that all contestants decode. Create it with `load`.

    assistant: the drafter's model. drafter_path: the drafter's directory, for packages that only
    load a drafter themselves.
    """

    target: Target
    assistant: PreTrainedModel
    drafter_path: str

    @classmethod
    def load(cls, target: Target, drafter: str) -> "Models":
        """Raises UserError for a drafter that only our loop can use."""
        opened = open_drafter(drafter, target)
        if not isinstance(opened, SmallLMDrafter) or opened.vocabulary is not None:
            raise UserError(
                f"drafter {drafter} is not a small language model with the target's whole "
                "vocabulary, and other decoding loops take no other; leave --drafter out to have "
                "one made"
            )
        models = cls(target, opened.lm.model, drafter)
        pad = target.tokenizer.pad_token_id
        for model in (target.model, models.assistant):
            model.generation_config = GenerationConfig(pad_token_id=0 if pad is None else pad)
        return models


def makers(models: Models, *, gamma: int, sampled: bool) -> dict[str, Maker]:
    """Return, for every name in NAMES, a function that makes the contestant ready to run.

    sampled: at temperature 1 from the full distribution, the only setting that all loops support.
    """
    sampling = Sampling(1.0 if sampled else 0.0)
    first: list[Decoder] = []

    def ours(drafter: Callable[[], Drafter]) -> Maker:
        def make() -> Contestant:
            decoder = Decoder(models.target.model, drafter(), gamma=gamma, sampling=sampling)
            if first:
                decoder.lm = first[0].lm  # one packed copy of the target is enough
            first.append(decoder)
            return _ours(decoder)

        return make

    lookup = {"prompt_lookup_num_tokens": gamma, "max_matching_ngram_size": MAX_N}
    constant = {
        "num_assistant_tokens": gamma,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    model = models.target.model
    return {
        "plain": ours(DRAFTERS["none"]),
        "speculative": ours(lambda: SmallLMDrafter(models.assistant)),
        "lookup": ours(lambda: NgramDrafter(max_n=MAX_N)),
        "generate": lambda: _transformers(model, sampled),
        "generate_packed": lambda: _transformers(_pack(model), sampled),
        "assisted": lambda: _transformers(model, sampled, models.assistant, constant),
        "assisted_defaults": lambda: _transformers(model, sampled, models.assistant, {}),
        "transformers_lookup": lambda: _transformers(model, sampled, None, lookup),
        "flashspec": lambda: _flashspec(models, gamma, sampled, lookup=False),
        "flashspec_lookup": lambda: _flashspec(models, gamma, sampled, lookup=True),
        "economize": lambda: _economize(models, gamma, sampled, lookup=False),
        "economize_lookup": lambda: _economize(models, gamma, sampled, lookup=True),
    }


def _ours(decoder: Decoder) -> Contestant:
    def run(prompts: Prompts, tokens: int, seed: int) -> Ran:
        done = decoder.decode(prompts, tokens, seed=seed)

        def passes() -> Passes:
            counts = done.counts
            return Passes(
                counts.steps,
                counts.emitted,
                int(counts.drafted.sum()),
                int(counts.reached.sum()),
                int(counts.accepted.sum()),
                [step.draft_s for step in done.steps],
                [step.verify_s for step in done.steps],
                [step.overhead_s for step in done.steps],
            )

        return Ran(done.outputs, passes)

    return run


def _pack(model: PreTrainedModel) -> PreTrainedModel:
    if not can_pack(model):
        raise RuntimeError("these weights are not packed on this device")
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
    drawn = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sampled else {}
    lookup = drafting if assistant is None and drafting else {}

    def run(prompts: Prompts, tokens: int, seed: int) -> Ran:
        settings = GenerationConfig(
            max_new_tokens=tokens, do_sample=sampled, pad_token_id=pad, **drawn, **lookup
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
            found = model.generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                assistant_model=assistant,
                generation_config=settings,
            )
        outputs = found[:, width:].tolist()
        drafts, rows = drafting is not None, len(outputs)
        return Ran(outputs, lambda: watch.passes(width, tokens, rows=rows, drafts=drafts))

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
            dtype=str(target.dtype).removeprefix("torch."),
            # One drafter with one γ: "auto" would mix in prompt lookup and ignore γ.
            drafter_strategy="bandit",
            bandit=flashspec.BanditConfig(n_arms=1),
            sampling=flashspec.SamplingConfig(gamma=gamma, temperature=temperature, seed=0),
        ),
        [drafter],
        TargetModel(target.name, device, target.dtype, model=target.model),
    )

    def run(prompts: Prompts, tokens: int, seed: int) -> Ran:
        if len({len(prompt) for prompt in prompts}) > 1:
            raise RuntimeError("it takes prompts of one length only, and no attention mask")
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

        return Ran(result.output_ids.tolist(), passes)

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

    def run(prompts: Prompts, tokens: int, seed: int) -> Ran:
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

        return Ran([result.tokens.tolist() for result in results], passes)

    return run
