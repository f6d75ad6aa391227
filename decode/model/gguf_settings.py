"""What a GGUF file says of its model, in the config that transformers makes from the file.

transformers reads a few keys of each architecture and passes over the others without a word. Here
every key of the format is compared with the config: what the config can say is set, a value that
changes nothing passes, and any other key is refused by name. The same holds for the tensors.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from torch import nn

from decode.base.errors import UserError
from decode.model.gguf_file import Header, gguf_eos_ids

# By the rest of a key behind its architecture: the fields of a config that say the same. The first
# one that a config has is meant.
_FIELDS: dict[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "d_model"),
    "feed_forward_length": ("intermediate_size", "ffn_hidden_size", "d_ff", "n_inner"),
    "vocab_size": ("vocab_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "attention.layer_norm_epsilon": (
        "layer_norm_eps",
        "layer_norm_epsilon",
        "norm_epsilon",
        "norm_eps",
    ),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.key_length": ("head_dim", "d_kv"),
    "attention.relative_buckets_count": ("relative_attention_num_buckets",),
    "attention.shared_kv_layers": ("num_kv_shared_layers",),
    "decoder_block_count": ("num_decoder_layers",),
    "decoder_start_token_id": ("decoder_start_token_id",),
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_norm": ("norm_topk_prob",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "use_parallel_residual": ("use_parallel_residual",),
    "full_attention_interval": ("full_attention_interval",),
    "shortconv.l_cache": ("conv_L_cache",),
    "ssm.conv_kernel": ("linear_conv_kernel_dim", "conv_kernel"),
    "ssm.state_size": ("linear_key_head_dim", "state_size"),
    "ssm.group_count": ("linear_num_key_heads",),
    "ssm.time_step_rank": ("linear_num_value_heads", "time_step_rank"),
}

# Values under which a key changes nothing, by its rest.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.head_count": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (1,),
    "expert_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (1,),
    "feed_forward_length": (0,),
    "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (1,),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (1,),
    "rope.scaling.alpha": (0,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "ssm.dt_b_c_rms": (False,),
}

# Keys that do not reach the numbers of a text: parts of one text have the same place in all
# sections, and `finetuned` is a note.
_WITHOUT_EFFECT = ("rope.dimension_sections", "rope.scaling.finetuned")

# By the first part of a key. Names, licences, sampling defaults and statistics of the quantiser;
# those of the tokenizer are read with it (`decode.model.gguf_tokenizer`). Keys of other first parts
# are notes of the tools that made the file, unless they describe a part of a model.
_OTHER_PARTS = ("adapter", "clip", "diffusion", "xielu")

# Families whose layers attend within a window that a file states.
_WINDOWED = ("phi3", "gemma2", "gemma3", "gemma4", "gpt-oss", "starcoder2")
# Of these, families where one layer in so many attends to all.
_PATTERN = {"gemma2": 2, "gemma3": 6, "gemma4": 6, "gpt-oss": 2}
# Families that rotate a part of a head where the config says so.
_PARTLY_ROTATED = ("phi3", "stablelm", "nemotron", "qwen35", "qwen35moe")
# Families whose largest model divides attention by the width of a head of the embedding, which no
# key says: the number of its layers.
_SCALED_BY_EMBEDDING = {"gemma2": 46, "gemma3": 62}

# Tensors of rotary factors, which are read into the config.
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class _Settings:
    """The keys of one file. A key that was asked for is read."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.architecture = str(header.metadata.get("general.architecture"))
        start = f"{self.architecture}."
        self.values = {
            key.removeprefix(start): _plain(value)
            for key, value in header.metadata.items()
            if key.startswith(start)
        }
        self.read: set[str] = set()

    def get(self, rest: str, default: Any = None) -> Any:
        self.read.add(rest)
        return self.values.get(rest, default)

    def refusal(self, rest: str, why: str) -> UserError:
        key, value = f"{self.architecture}.{rest}", self.values.get(rest)
        return UserError(
            f"{self.header.path} says {key} = {value!r}, {why}. Without it the model computes "
            "other numbers. Name the directory that the file was made from, in transformers' format"
        )


def set_config(config: Any, header: Header) -> None:
    """Makes a config that transformers made from a GGUF file say all that the file says.

    Raises UserError for a key, or a value of one, that the config cannot say, and for files that
    hold no model.
    """
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise UserError(f"{header.path} holds a {kind}, expected a model; name the model's file")
    for key in header.metadata:
        if key.split(".")[0] in _OTHER_PARTS:
            raise UserError(
                f"{header.path} has the key {key}, of a model with a part that is not read from "
                "GGUF files. Name the directory that the file was made from"
            )
    settings = _Settings(header)
    text = config.get_text_config()
    _set_fields(text, settings)
    _set_heads(text, settings)
    _set_windows(text, settings)
    _set_rotations(text, settings)
    for rest in sorted(settings.values.keys() - settings.read):
        if rest in _WITHOUT_EFFECT:
            continue
        if not _same(settings.values[rest], *_NEUTRAL.get(rest, ())):
            raise settings.refusal(rest, "which is not read here, nor by transformers")
    for holder in {id(part): part for part in (config, text)}.values():
        holder.eos_token_id = gguf_eos_ids(header.metadata)


def _set_fields(config: Any, settings: _Settings) -> None:
    per_layer = isinstance(settings.values.get("attention.head_count_kv"), list)
    for rest, fields in _FIELDS.items():
        value = settings.values.get(rest)
        field = next((field for field in fields if hasattr(config, field)), None)
        if value is None or field is None or _same(value, *_NEUTRAL.get(rest, ())):
            continue
        if rest == "attention.head_count_kv" and per_layer:
            # LFM2: layers without attention have 0 heads. transformers reads which these are.
            if _same({*value} - {0}, {getattr(config, field)}) and hasattr(config, "layer_types"):
                settings.get(rest)
            continue
        settings.get(rest)
        if rest == "attention.key_length" and settings.architecture == "gemma4":
            field = "global_head_dim"
        if not _same(getattr(config, field), value):
            setattr(config, field, _decimal(value))
    _compare(config, settings)


def _compare(config: Any, settings: _Settings) -> None:
    """Read the keys of what a config says in other words. Raises UserError if it says otherwise."""
    said: dict[str, Callable[[], Any]] = {
        "block_count": lambda: _layers(config) + settings.get("nextn_predict_layers", 0),
        "feed_forward_length": lambda: 4 * config.hidden_size,
        "attention.head_count_kv": lambda: config.num_attention_heads,
        "attention.value_length": lambda: settings.get("attention.key_length"),
        "attention.value_length_swa": lambda: settings.get("attention.key_length_swa"),
        "attention.key_length_swa": lambda: config.head_dim,
        "attention.recurrent_layers": lambda: (
            [kind == "linear_attention" for kind in config.layer_types]
            + [False] * settings.get("nextn_predict_layers", 0)
        ),
        "ssm.inner_size": lambda: (
            config.intermediate_size
            if config.model_type == "mamba"
            else config.linear_value_head_dim * config.linear_num_value_heads
        ),
        "expert_gating_func": lambda: {"softmax": 1, "sigmoid": 2}.get(
            getattr(config, "scoring_func", "softmax")
        ),
        "tensor_data_layout": lambda: "jploski" if config.model_type == "falcon" else None,
    }
    for rest, expected in said.items():
        if rest not in settings.values or rest in settings.read:
            continue
        try:
            same = _same(settings.values[rest], expected())
        except AttributeError:  # a field that this family does not have
            same = False
        if same:
            settings.get(rest)
    if "context_length" in settings.values and not hasattr(config, "max_position_embeddings"):
        settings.get("context_length")  # positions without a limit, such as those of Bloom


def _layers(config: Any) -> int:
    return int(config.num_hidden_layers)


def _set_heads(config: Any, settings: _Settings) -> None:
    if "attention.key_length" not in settings.values and "head_dim" in config.to_dict():
        # Not the width of its rotated part, nor that of some model of the family.
        config.head_dim = config.hidden_size // config.num_attention_heads
    if not hasattr(config, "query_pre_attn_scalar"):
        return
    width = config.hidden_size // config.num_attention_heads
    largest = _SCALED_BY_EMBEDDING.get(settings.architecture) == config.num_hidden_layers
    scale = settings.get("attention.scale")
    scalar = scale**-2 if scale else width if largest else config.head_dim
    config.query_pre_attn_scalar = scalar


def _set_windows(config: Any, settings: _Settings) -> None:
    if settings.architecture not in _WINDOWED:
        # Mistral's own config has a window that files of its architecture, llama, do not state.
        if config.model_type == "mistral":
            config.sliding_window = None
        return
    layers = config.num_hidden_layers
    window = settings.get("attention.sliding_window", 0)
    pattern = settings.get(
        "attention.sliding_window_pattern", _PATTERN.get(settings.architecture, 1)
    )
    config.sliding_window = window or None
    if settings.architecture not in _PATTERN:
        if "attention.sliding_window_pattern" in settings.values:
            raise settings.refusal("attention.sliding_window_pattern", "which is not read here")
        return
    if isinstance(pattern, list):
        within = [bool(one) for one in pattern][:layers]
    else:
        within = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(layers)]
    if not window:
        within, config.sliding_window = [False] * layers, layers and config.max_position_embeddings
    config.layer_types = ["sliding_attention" if one else "full_attention" for one in within]


def _set_rotations(config: Any, settings: _Settings) -> None:
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        return
    nested = {kind: p for kind, p in parameters.items() if isinstance(p, dict)}
    everywhere = nested.get("full_attention", parameters)
    local = nested.get("sliding_attention")
    _set_base(everywhere, settings.get("rope.freq_base"))
    if local is not None:
        _set_base(local, settings.get("rope.freq_base_swa"))
    elif _same(settings.values.get("rope.freq_base_swa"), everywhere["rope_theta"]):
        settings.get("rope.freq_base_swa")

    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = settings.get("rope.dimension_count", head)
    if settings.architecture in _PARTLY_ROTATED:
        everywhere["partial_rotary_factor"] = rotated / head
    elif settings.architecture == "minimax-m2":
        config.rotary_dim = rotated
    elif settings.architecture == "gemma4":
        rotated = settings.get("rope.dimension_count_swa", head)
        settings.get("attention.key_length_swa")
    elif rotated != head:
        raise settings.refusal(
            "rope.dimension_count", f"a part of its heads of {head} numbers, which is not read"
        )
    scaling = _scaling(config, everywhere, settings)
    if scaling is None:
        return
    if nested:
        nested["full_attention"] |= scaling
    else:
        parameters |= scaling
    config.rope_parameters = parameters
    config.standardize_rope_params()
    config.validate_rope()


def _set_base(parameters: dict[str, Any], base: float | None) -> None:
    if base is not None and not _same(parameters.get("rope_theta"), base):
        parameters["rope_theta"] = _decimal(base)


def _scaling(config: Any, base: dict[str, Any], settings: _Settings) -> dict[str, Any] | None:
    """The rotary scaling of the file in transformers' words, or None if it has none."""
    header = settings.header
    kind = settings.get("rope.scaling.type", "")
    factor = settings.get("rope.scaling.factor") or settings.get("rope.scale_linear") or 1
    original = settings.get("rope.scaling.original_context_length")
    attention = settings.get("rope.scaling.attn_factor")
    present = [name for name in _FACTORS if name in header.tensors]
    if settings.architecture == "gemma4" and present:
        _require_proportional(base, settings)
        return None
    if hasattr(config, "original_max_position_embeddings"):
        original = original or config.max_position_embeddings
        config.original_max_position_embeddings = original
    if present == ["rope_freqs.weight"] and kind in ("", "none"):
        return _slowed(config, base, header.numbers("rope_freqs.weight"))
    if sorted(present) == sorted(_FACTORS[1:]) and kind in ("", "longrope"):
        long, short = (header.numbers(name) for name in _FACTORS[1:])
        scaling = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        scaling["original_max_position_embeddings"] = original or config.max_position_embeddings
        return scaling if attention is None else scaling | {"attention_factor": attention}
    if present:
        raise UserError(
            f"{header.path} has {', '.join(present)} and {settings.architecture}.rope.scaling.type "
            f"{kind!r}, which do not go together here. Name the directory that the file was made "
            "from, in transformers' format"
        )
    if kind == "yarn":
        return _yarn(factor, original, attention, base, settings)
    if kind == "linear" or (kind == "" and factor != 1):
        return {"rope_type": "linear", "factor": factor}
    if kind in ("", "none") or (kind == "longrope" and not present):
        return {"rope_type": "default"} if base["rope_type"] != "default" else None
    raise settings.refusal("rope.scaling.type", "a scaling of rotary positions that is not known")


def _yarn(
    factor: float,
    original: int | None,
    attention: float | None,
    base: dict[str, Any],
    settings: _Settings,
) -> dict[str, Any]:
    scaling = {"rope_type": "yarn", "factor": factor}
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    for ours, rest in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        value = settings.get(f"rope.scaling.{rest}")
        if value is not None:
            scaling[ours] = value
    told = settings.get("rope.scaling.yarn_attn_factor")
    if told is not None:
        scaling["attention_factor"] = told
    elif attention is not None and attention != 1:
        # llama.cpp multiplies its own factor by this one.
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1)
    if base.get("truncate") is not None:
        scaling["truncate"] = base["truncate"]
    return scaling


def _slowed(config: Any, base: dict[str, Any], factors: list[float]) -> dict[str, Any] | None:
    """The scaling that divides each frequency by a factor. float32 [rotated / 2]."""
    if all(factor == 1 for factor in factors):
        return None
    llama = {
        "rope_type": "llama3",
        "factor": _decimal(max(factors)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if np.allclose(_llama_factors(base["rope_theta"], llama, len(factors)), factors, rtol=1e-5):
        return llama
    # The only scaling of transformers that takes factors. One length has them all.
    return {
        "rope_type": "longrope",
        "long_factor": factors,
        "short_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config.max_position_embeddings,
    }


def _llama_factors(theta: float, llama: dict[str, Any], count: int) -> np.ndarray:
    """What Llama 3.1 divides each frequency by. float64 [count]."""
    turns = theta ** -(np.arange(count) / count) / (2 * math.pi)
    turns *= llama["original_max_position_embeddings"]
    low, high = llama["low_freq_factor"], llama["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / llama["factor"] + smooth))


def _require_proportional(base: dict[str, Any], settings: _Settings) -> None:
    """Gemma 4 does not rotate the last pairs: they are slowed without end. transformers knows how
    many. Raises UserError if the file says otherwise."""
    factors = settings.header.numbers("rope_freqs.weight")
    rotated = round(len(factors) * base.get("partial_rotary_factor", 1))
    if [factor > 1e9 for factor in factors] != [pair >= rotated for pair in range(len(factors))]:
        raise UserError(
            f"rope_freqs.weight of {settings.header.path} does not leave the last "
            f"{len(factors) - rotated} of {len(factors)} pairs unrotated, as gemma4 does. Name the "
            "directory that the file was made from, in transformers' format"
        )


def require_all_read(header: Header, model: nn.Module) -> None:
    """Raises UserError, with names, if the file has tensors that the model does not.

    model: may be on the device `meta`.
    """
    architecture = str(header.metadata.get("general.architecture"))
    layers = int(header.metadata.get(f"{architecture}.block_count", 0))
    extra = int(header.metadata.get(f"{architecture}.nextn_predict_layers", 0))
    read = {*_FACTORS, *_names(architecture, layers, model.state_dict())}
    modules = tuple(f"blk.{layers - 1 - n}." for n in range(extra))
    unread = sorted(
        name for name in header.tensors if name not in read and not name.startswith(modules)
    )
    if unread:
        more = f" and {len(unread) - 3} more" if unread[3:] else ""
        raise UserError(
            f"{header.path} has tensors that transformers does not read into a model of the "
            f"architecture {architecture}: {', '.join(unread[:3])}{more}. Without them the model "
            "computes other numbers. Name the directory that the file was made from, in "
            "transformers' format"
        )


def _names(architecture: str, layers: int, weights: Iterable[str]) -> Iterator[str]:
    """The names in a GGUF file of a model's weights."""
    import gguf

    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(numbers[architecture], layers)
    for weight in weights:
        stem, dot, kind = weight.rpartition(".")
        if kind not in ("weight", "bias"):
            stem, dot, kind = weight, "", ""
        # Some families are converted from the model within the one with an output layer.
        for name in (stem, stem.partition(".")[2]):
            found = table.get_name(name)
            if found is not None:
                yield f"{found}{dot}{kind}"
                yield from (f"{found}.{end}" for end in ("weight", "bias") if not dot)
        layer = stem.split(".experts.")[0].rpartition(".layers.")[2].split(".")[0]
        if ".experts." in weight:
            part = stem.rpartition(".")[2]
            for name in ("gate", "up") if part.startswith("gate_up") else ("down",):
                end = "bias" if weight.endswith("bias") else "weight"
                yield f"blk.{layer}.ffn_{name}_exps.{end}"


def _plain(value: Any) -> Any:
    """An array of equal numbers is that number."""
    if isinstance(value, list) and value and len({*value}) == 1 and len(value) > 1:
        return value[0]
    return value


def _same(value: Any, *others: Any) -> bool:
    """Whether a value is one of others, as float32 numbers if they are no integers."""
    return any(
        value == other
        or (
            isinstance(value, int | float)
            and isinstance(other, int | float)
            and np.float32(value) == np.float32(other)
        )
        for other in others
    )


def _decimal(value: Any) -> Any:
    """A float32 number of a file as the shortest decimal number that stands for it."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
