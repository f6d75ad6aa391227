"""What the layers of a model keep of a text, as its config names them (`layer_types`)."""

from typing import Any

from transformers import PreTrainedModel

from decode.errors import UserError
from decode.target.pretrained import decoder_config

# Layers that keep a running state in place of keys and values.
RECURRENT = frozenset({"linear_attention", "conv"})


def recurrent_layers(model: Any) -> list[int]:
    """The numbers of the layers that keep a running state (`recurrent_states`)."""
    kinds = getattr(decoder_config(model), "layer_types", None) or ()
    return [number for number, kind in enumerate(kinds) if kind in RECURRENT]


def require_slots(model: PreTrainedModel) -> None:
    """Check, before any computation, that each layer's past is one key and value per token, or a
    state that `decode.target.kinds.recurrent_states` can roll back.

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


def layer_windows(model: PreTrainedModel) -> list[int | None]:
    """How many tokens back each layer sees, the token itself included. None: all tokens."""
    config = decoder_config(model)
    window: int | None = getattr(config, "sliding_window", None)
    # A checkpoint can name a window that its kind of model does not have.
    if not hasattr(type(config), "sliding_window") or not getattr(
        config, "use_sliding_window", True
    ):
        window = None
    layers: int = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in kinds]
