"""A small model of the same kind as a large one, with random weights: what a trial runs.

Its config is the large model's with fewer layers, heads and tokens, and with short windows. What
decides about masks, positions and caches stays: the class, the kinds of layers, the rotary
settings, the size of a head.
"""

import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from decode.model.layer_settings import kept_settings
from decode.model.pretrained import has_encoder

VOCABULARY = 320
WINDOW = 6
POSITIONS = 64  # at least: a trial's texts fit
EXPERTS = 16
INNER = 128  # the width of feed-forward layers
LAYERS = 4  # the fewest layers
# The most weights of a small copy: better fewer heads than more weights than the first number.
MOST_WEIGHTS = (1 << 23, 1 << 26)

# The names of sizes in configs of transformers.
_LAYERS = re.compile(r"^((num_)?(hidden|encoder|decoder)_layers|(n|num)_layers?|num_blocks)$")
_HEADS = re.compile(r"heads$|^(n_head|num_query_groups)$|^num_attention_heads_per_layer$")
_WIDTHS = re.compile(
    r"^(hidden|embedding|attention_hidden|(in|out)put_embedding)_size$"
    r"|^(d_model|n_embd|emb_dim|embedding_dim|word_embed_proj_dim|lru_width)$"
)
_INNER = re.compile(
    r"intermediate_size|^(expert_)?ffn_hidden_size$|ffn_dim$|^(d_?ff|dim_ff|n_inner|d_inner)$"
)
_EXPERTS = re.compile(r"(num|n)_(routed_|local_)?experts$")
_WINDOWS = re.compile(r"window(_size)?$|^(local_attention|index_topk)$")
_POSITIONS = re.compile(r"^(max_position_embeddings|n_positions|n_ctx|max_seq(uence)?_len(gth)?)$")
_TOKENS = re.compile(r"_token_(id|index)$|^(pad|eos|bos|unk|mask)_index$")


def small_model(kind: Any, config: Any) -> PreTrainedModel | None:
    """A small model of a class of models, for a config: float32, on the CPU, in eval mode, with
    random weights that make every token and position count. None if the config gives none."""
    models = (
        _random_model(kind, small, most)
        for most in MOST_WEIGHTS
        for small in _small_configs(config)
    )
    return next((model for model in models if model is not None), None)


def _small_configs(config: Any) -> Iterator[Any]:
    """The config with fewer layers and tokens, at first also with fewer heads."""
    for heads in (4, 2, 1, None):
        small = copy.deepcopy(config)
        vars(small).pop("quantization_config", None)
        small.dtype = torch.float32
        for part in _parts(small):
            _shorten(part)
            if heads is not None:
                _narrow(part, heads)
        yield small


def _parts(config: Any) -> list[Any]:
    """A config and those inside of it."""
    inner = [value for value in vars(config).values() if hasattr(value, "attribute_map")]
    return [config, *(part for one in inner for part in _parts(one))]


def _change(config: Any, name: re.Pattern[str], change: Any) -> None:
    """Change the whole numbers of a config with such names, also those of single layers."""
    of_layers = [x.get("per_layer_overrides", {}) for x in _spec(config)]
    overrides = [layer for layers in of_layers for layer in layers.values()]
    for values in (vars(config), *overrides):
        for key, value in values.items():
            if type(value) is int and name.search(key):
                values[key] = change(value)
            elif type(value) is list and name.search(key):
                values[key] = [change(one) if type(one) is int else one for one in value]


def _spec(config: Any) -> list[dict[str, Any]]:
    """The attributes of what holds the values of single layers, if there are some."""
    spec = getattr(config, "_heterogeneity_spec", None)
    return [vars(spec)] if spec else []


def _shorten(config: Any) -> None:
    """Fewer layers and tokens, short windows, and positions for a trial's texts."""
    _change(config, re.compile(r"vocab_size|^n_words$"), lambda size: min(size, VOCABULARY))
    _change(config, _TOKENS, lambda token: token if token < VOCABULARY else 0)
    _change(config, _WINDOWS, lambda size: min(size, WINDOW))
    _change(config, _POSITIONS, lambda count: max(count, POSITIONS))
    layers = vars(config).get(_own_name(config, "num_hidden_layers"))
    if type(layers) is not int:
        return
    kept = _kept_layers(config, layers)
    for values in (vars(config), *_spec(config)):
        values.update(kept_settings(values, kept, layers))
    _change(config, _LAYERS, lambda count: min(count, len(kept)))


def _own_name(config: Any, name: str) -> str:
    return str(config.attribute_map.get(name, name))


def _kept_layers(config: Any, layers: int) -> list[int]:
    """Two layers of each kind, but at least `LAYERS` in all."""
    kinds: dict[str, list[int]] = {}
    for number in range(layers):
        settings = [kept_settings(x, [number], layers) for x in (vars(config), *_spec(config))]
        kinds.setdefault(repr(settings), []).append(number)
    kept = {number for numbers in kinds.values() for number in numbers[:2]}
    return sorted(kept | set(range(min(LAYERS, layers))))


def _narrow(config: Any, heads: int) -> None:
    """At least this number of heads, of the size that they have, and widths in proportion."""
    _change(config, _INNER, lambda size: min(size, INNER))
    _change(config, _EXPERTS, lambda count: min(count, EXPERTS))
    before = vars(config).get(_own_name(config, "num_attention_heads"))
    if type(before) is not int or before <= heads:
        return
    factor = before // next(x for x in range(heads, before + 1) if before % x == 0)
    _change(config, _HEADS, lambda count: max(count // factor, min(count, 1)))
    _change(config, _WIDTHS, lambda size: _divided(size, factor))


def _divided(width: int, factor: int) -> int:
    """A width that is no multiple of the heads does not depend on them."""
    return width // factor if width % factor == 0 else max(width // factor, 8) // 8 * 8


def _random_model(kind: Any, config: Any, most: int) -> PreTrainedModel | None:
    """A model of this config with random weights. None if there is none, or one with more weights
    than `most`."""
    attention = config._attn_implementation
    try:
        with torch.device("meta"):
            weights = sum(x.numel() for x in kind._from_config(copy.deepcopy(config)).parameters())
        if weights > most:
            return None
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(0)
            model = kind._from_config(config, dtype=torch.float32, attn_implementation=attention)
            model.eval().requires_grad_(False)
            _draw(model)
            ids = torch.arange(8, 12)[None]
            model(input_ids=ids, **({"decoder_input_ids": ids} if has_encoder(model) else {}))
    except Exception:  # whatever the class raises for sizes that do not fit together
        return None
    return model


def _draw(model: nn.Module) -> None:
    """Weights so large that every layer and position counts: those that models begin with hide what
    attention does."""
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            std = (
                1.0
                if "emb" in name or "wte" in name or "wpe" in name
                else 1.6 / weight.shape[-1] ** 0.5
            )
            weight.normal_(std=std)
