"""The effect of a checkpoint's `generation_config` on the text.

`generate()` of transformers fills every setting that the caller leaves at None from the model's
`generation_config`. If it is None there too, `generate()` uses its default. Chat models come with a
temperature, top-k, top-p and a repetition penalty, so the same call means something different for
every checkpoint. This file has both ways to handle that: run `generate()` with explicit settings
only, and read the values that it would fill in.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from decode.errors import UserError
from decode.sampling import Sampling

# The values that `generate()` uses if neither the caller nor the checkpoint sets them.
DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
# Settings that change the text and that our loop does not have, with the values that switch them
# off. None and [] always switch them off.
_REFUSED: dict[str, float | None] = {
    "num_return_sequences": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1,
    "watermarking_config": None,
    "stop_strings": None,
    "max_time": None,
    "penalty_alpha": None,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
}
_REFUSED_WHEN_SAMPLED: dict[str, float | None] = {
    "typical_p": 1,
    "top_h": None,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
}


def stated_config(
    sampling: Sampling, *, max_new_tokens: int, eos_token_ids: Sequence[int], **more: Any
) -> GenerationConfig:
    """The settings that make `generate()` draw like our loop with `sampling`.

    more: additional settings of a GenerationConfig. Pass the result inside `nothing_filled_in`:
    here, None switches a filter off, but `generate()` treats None as a setting that is not given.
    """
    drawn: dict[str, Any] = {"do_sample": not sampling.greedy}
    if not sampling.greedy:
        drawn |= {key: getattr(sampling, key) for key in ("temperature", "top_k", "top_p")}
        drawn["min_p"] = sampling.min_p or None
    eos = list(eos_token_ids)
    settings = {
        "max_new_tokens": max_new_tokens,
        "num_beams": 1,
        "repetition_penalty": sampling.repetition_penalty,
        "eos_token_id": eos or None,
        "pad_token_id": eos[0] if eos else 0,
    }
    return GenerationConfig(**(settings | drawn | more))


@contextmanager
def nothing_filled_in(model: PreTrainedModel) -> Iterator[None]:
    """Inside this context, `model.generate()` uses only its arguments and its defaults."""
    original = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = original


def sampling_as_generate(
    config: GenerationConfig,
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
) -> Sampling:
    """How `model.generate()` draws tokens with these settings on a checkpoint with this config.

    A setting that is None comes from the checkpoint, or from `DEFAULTS` if the checkpoint does not
    set it. Text is greedy at temperature 0, and at None if the checkpoint does not set `do_sample`.
    Raises UserError for a setting of the checkpoint that changes the text and that we do not have.
    """

    arguments = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    values = DEFAULTS | {
        key: value
        for key in DEFAULTS
        if (value := getattr(config, key, None) if arguments[key] is None else arguments[key])
        is not None
    }
    if temperature is None and not config.do_sample:
        values["temperature"] = 0.0
    _require_supported(config, greedy=values["temperature"] == 0)
    return Sampling(**values)


def _require_supported(config: GenerationConfig, greedy: bool) -> None:
    named = _REFUSED if greedy else _REFUSED | _REFUSED_WHEN_SAMPLED
    unsupported = {
        key: value
        for key, off in named.items()
        if (value := getattr(config, key, None)) not in (None, [], off)
    }
    if not unsupported:
        return
    listed = ", ".join(f"{key}={value!r}" for key, value in unsupported.items())
    off = ", ".join(f"model.generation_config.{key} = {named[key]}" for key in unsupported)
    raise UserError(
        f"the checkpoint's generation_config sets {listed}, which generate() applies but this loop "
        f"does not support. Switch it off ({off}), or use model.generate()"
    )


def padded_prompts(
    prompts: Sequence[Sequence[int]], pad: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(ids, attention mask), int64 [B, L] each: the prompts as `generate()` takes them, padded on
    the left."""
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), pad, device=device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt, device=device)
        mask[row, longest - len(prompt) :] = 1
    return ids, mask
