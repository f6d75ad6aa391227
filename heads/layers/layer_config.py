"""The config of a drafter's decoder layer: its target's, or with settings of its own."""

from typing import Any

from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from decode.base.errors import UserError
from decode.model.kinds.layer_kinds import attention_size, usual_layer
from decode.model.pretrained import explained
from heads.options import LayerSettings


def feed_forward_size(config: Any) -> int:
    """Width of the feed-forward layers of a model with this (text) config: of most of them."""
    config = usual_layer(config)
    return getattr(config, "intermediate_size", None) or 4 * int(config.hidden_size)


def layer_config(model: PreTrainedModel, settings: LayerSettings | None = None) -> LlamaConfig:
    """Config of a one-layer llama with the target's sizes, except those in `settings`. Missing
    settings get llama's values. Sizes that differ between the target's layers are those of most
    layers. Raises UserError for key heads that do not divide the query heads,
    and for query heads that do not divide the hidden size.
    """
    config = usual_layer(model.config.get_text_config())
    size = attention_size(config)
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in rope:  # no rotary settings, or several kinds
        rope = {"rope_type": "default", "rope_theta": 10000.0}
    values: dict[str, Any] = {
        "intermediate_size": feed_forward_size(config),
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.key_heads,
        "head_dim": size.head_size,
        "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-6,
        "rope_parameters": dict(rope),
    }
    if settings is not None:
        values |= settings.model_dump(exclude_none=True)
    counts = values["num_attention_heads"], values["num_key_value_heads"]
    if counts[0] % counts[1]:
        raise UserError(
            f"the drafter's layer has {counts[0]} query heads and {counts[1]} key heads; expected "
            "a number of key heads that divides the number of query heads"
        )
    if config.hidden_size % counts[0]:
        raise UserError(
            f"the drafter's layer has {counts[0]} query heads; expected a number that divides the "
            f"target's hidden size, {config.hidden_size}, as transformers' llama needs it"
        )
    shown = ", ".join(f"{key}: {value!r}" for key, value in values.items())
    with explained(f"the drafter's layer cannot be made with {shown}"):
        made = LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=1,
            max_position_embeddings=getattr(config, "max_position_embeddings", None) or 1 << 30,
            pad_token_id=config.pad_token_id,
            bos_token_id=getattr(config, "bos_token_id", None),  # T5 has none
            eos_token_id=config.eos_token_id,
            **values,
        )
        LlamaRotaryEmbedding(made)
    return made
