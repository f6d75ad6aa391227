"""The effect of a checkpoint's `generation_config` on the text.

`generate()` of transformers fills every setting that the caller leaves at None from the model's
`generation_config`. If it is None there too, `generate()` uses its default. Chat models come with a
temperature, top-k, top-p and a repetition penalty, so the same call means something different for
every checkpoint. This file has both ways to handle that: run `generate()` with explicit settings
only, and read the values that it would fill in.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import logits_process as hf

from decode.base.errors import UserError, require_whole
from decode.draw.sampling import Sampling
from decode.model.pretrained import decoder_start, has_encoder, replaced

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
# Of these, what the loop does for a model with an encoder, whose texts all begin with one token.
_OF_DECODERS = (
    "no_repeat_ngram_size",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "min_length",
    "min_new_tokens",
)
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


def nothing_filled_in(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Inside this context, `model.generate()` uses only its arguments and its defaults."""
    return replaced(model, "generation_config", GenerationConfig())


def sampling_as_generate(
    config: GenerationConfig,
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    encoder: bool = False,
) -> Sampling:
    """How `model.generate()` draws tokens with these settings on a checkpoint with this config.

    A setting that is None comes from the checkpoint, or from `DEFAULTS` if the checkpoint does not
    set it. Text is greedy at temperature 0, and at None if the checkpoint does not set `do_sample`.
    encoder: the model has an encoder, so `decoder_processors` does what its checkpoint sets. Raises
    UserError for a setting of the checkpoint that changes the text and that we do not have.
    """
    given = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    stored = {key: getattr(config, key, None) for key in DEFAULTS}
    values = dict(DEFAULTS)
    for settings in (stored, given):
        values |= {key: value for key, value in settings.items() if value is not None}
    if temperature is None and not config.do_sample:
        values["temperature"] = 0.0
    _require_supported(config, values["temperature"] == 0, _OF_DECODERS if encoder else ())
    return Sampling(**values)


def decoder_settings(model: PreTrainedModel, *, limited: bool = True) -> dict[str, Any]:
    """The settings of the checkpoint that force or forbid tokens, for a model with an encoder, and
    the token that its texts start with. Empty for a model without an encoder. limited: with the
    token at the length limit (forced_eos_token_id)."""
    if not has_encoder(model):
        return {}
    config = model.generation_config
    named = {
        key: value
        for key in _OF_DECODERS
        if (value := getattr(config, key, None)) not in (None, [], _REFUSED[key])
    }
    if not limited:
        named.pop("forced_eos_token_id", None)
    return named | {"decoder_start_token_id": decoder_start(model)}


def eos_ids(given: Sequence[int] | int | None) -> list[int]:
    """The ids that end a text, given as in a generation config. Raises UserError unless they are
    whole numbers."""
    if given is None:
        return []
    ids = list(given) if isinstance(given, Sequence) else [given]
    for token in ids:
        require_whole(0, eos_token_id=token)
    return [int(token) for token in ids]


def decoder_processors(
    model: PreTrainedModel, eos_token_ids: Sequence[int], max_new_tokens: int | None = None
) -> list[hf.LogitsProcessor]:
    """The processors with which `generate()` follows `decoder_settings`, in its order.

    max_new_tokens: at this length forced_eos_token_id is forced. None: it is not.
    """
    settings = decoder_settings(model, limited=max_new_tokens is not None)
    eos, device = list(eos_token_ids), str(model.device)
    # Texts begin with one token, and for some models with another one that is forced.
    begin = 2 if "forced_bos_token_id" in settings else 1
    make: dict[str, Any] = {
        "no_repeat_ngram_size": hf.NoRepeatNGramLogitsProcessor,
        "bad_words_ids": lambda ids: hf.NoBadWordsLogitsProcessor(ids, eos),
        "min_length": lambda length: hf.MinLengthLogitsProcessor(length, eos, device=device),
        "min_new_tokens": lambda length: hf.MinNewTokensLengthLogitsProcessor(
            1, length, eos, device=device
        ),
        "forced_bos_token_id": hf.ForcedBOSTokenLogitsProcessor,
        "forced_eos_token_id": lambda ids: hf.ForcedEOSTokenLogitsProcessor(
            1 + (max_new_tokens or 0), ids, device=device
        ),
        "suppress_tokens": lambda ids: hf.SuppressTokensLogitsProcessor(ids, device=device),
        "begin_suppress_tokens": lambda ids: hf.SuppressTokensAtBeginLogitsProcessor(
            ids, begin, device=device
        ),
    }
    return [make[key](settings[key]) for key in make if key in settings]


def _require_supported(config: GenerationConfig, greedy: bool, done: Sequence[str]) -> None:
    named = _REFUSED if greedy else _REFUSED | _REFUSED_WHEN_SAMPLED
    unsupported = {
        key: value
        for key, off in named.items()
        if key not in done and (value := getattr(config, key, None)) not in (None, [], off)
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
    prompts: Sequence[Sequence[int]], pad: int, device: torch.device, *, right: bool = False
) -> tuple[Tensor, Tensor]:
    """(ids, attention mask), int64 [B, L] each: the prompts as `generate()` takes them, padded on
    the left. right: padded on the right, for an encoder, which counts positions from the left."""
    rows = [torch.tensor(prompt, dtype=torch.int64) for prompt in prompts]
    padded = partial(pad_sequence, batch_first=True, padding_side="right" if right else "left")
    ids, mask = padded(rows, padding_value=pad), padded([torch.ones_like(row) for row in rows])
    return ids.to(device), mask.to(device)
