"""What the layers of a model keep of a text, as its config names them (`layer_types`)."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from decode.base.errors import UserError
from decode.model.pretrained import decoder_config

# Layers that keep a running state in place of keys and values.
RECURRENT = frozenset({"linear_attention", "conv"})


def recurrent_layers(model: Any) -> list[int]:
    """The numbers of the layers that keep a running state (`recurrent_states`)."""
    kinds = getattr(decoder_config(model), "layer_types", None) or ()
    return [number for number, kind in enumerate(kinds) if kind in RECURRENT]


def require_slots(model: PreTrainedModel) -> None:
    """Check, before any computation, that each layer's past is one key and value per token, or a
    state that `decode.model.kinds.recurrent_states` can roll back.

    Raises UserError for models without a layer of the first kind, for layers of other kinds, and
    for attention implementations that take no mask.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    unnamed = getattr(model, "_is_stateful", False) and not kinds & RECURRENT
    attends = kinds & {"full_attention", "sliding_attention"}
    if unnamed or not attends or kinds - attends - RECURRENT:
        raise UserError(
            f"{type(model).__name__} keeps a running state ({', '.join(sorted(kinds))}) that "
            "cannot be rolled back after a rejected draft; use a model with attention layers, or "
            "one such as Qwen3-Next"
        )
    attention = str(model.config._attn_implementation)
    if "flash" in attention:
        raise UserError(
            f"{type(model).__name__} computes attention with {attention}, which takes no mask for "
            "rows of different lengths and for token trees; load it with "
            "attn_implementation='sdpa' or 'eager'"
        )


def require_no_states(model: PreTrainedModel) -> None:
    """Raise UserError for a model with running states, which drafts by the model's own layers would
    change."""
    if recurrent_layers(model):
        raise UserError(
            f"{type(model).__name__} keeps a running state in some layers, which a draft by the "
            "target's own layers would change; choose a drafter that runs no layers of the target"
        )


def layer_configs(model: Any) -> list[Any]:
    """The config of each layer. Only these have values that differ between the layers of a model,
    such as the sizes of heads in Gemma 4."""
    return list(decoder_config(model).per_layer_config)


@dataclass(frozen=True)
class AttentionSize:
    """The query heads and key heads of a layer, and the size of each head."""

    heads: int
    key_heads: int
    head_size: int


def attention_sizes(model: Any) -> list[AttentionSize]:
    """Of each layer with attention."""
    recurrent = recurrent_layers(model)
    return [
        attention_size(config)
        for number, config in enumerate(layer_configs(model))
        if number not in recurrent
    ]


def usual_layer(config: Any) -> Any:
    """The config of those layers whose attention has the sizes that most layers have. config: of
    the model's text."""
    layers = list(config.per_layer_config)
    sizes = [attention_size(layer) for layer in layers]
    return layers[sizes.index(Counter(sizes).most_common(1)[0][0])]


def attention_size(config: Any) -> AttentionSize:
    """Of a layer with this config."""
    heads = int(config.num_attention_heads)
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return AttentionSize(
        heads, key_heads, getattr(config, "head_dim", None) or config.hidden_size // heads
    )


def layer_windows(model: PreTrainedModel) -> list[int | None]:
    """How many tokens back each layer sees, the token itself included. None: all tokens."""
    layers = layer_configs(model)
    # A checkpoint can name a window that its kind of model does not have.
    if not _has_window(layers[0]):
        return [None] * len(layers)
    kinds = getattr(layers[0], "layer_types", None) or ["sliding_attention"] * len(layers)
    return [
        config.sliding_window if kind == "sliding_attention" else None
        for config, kind in zip(layers, kinds, strict=True)
    ]


def _has_window(config: Any) -> bool:
    """Whether models with such a config have layers with a sliding window. Some configs state the
    window only in their instances."""
    if not getattr(config, "sliding_window", None) or not getattr(
        config, "use_sliding_window", True
    ):
        return False
    try:
        usual = type(config)()
    except Exception:  # it has no default form, so only the given one can tell
        return True
    return hasattr(usual, "sliding_window")
