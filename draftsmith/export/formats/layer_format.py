"""Layouts of decoder layers: what those of EAGLE and those of block drafters share.

`config.json` is that of a model of a few layers, `model.safetensors` holds the weights. H hidden
size, V vocabulary.
"""

from abc import abstractmethod
from typing import Any, ClassVar

from transformers import LlamaConfig

from decode.model.loading import Target
from draftsmith.export.file_schema import DTYPE_NAMES, is_count, is_positive
from draftsmith.export.formats.table_format import TableFormat
from heads.heads_drafter import HeadsDrafter
from heads.layers.layer_config import LayerSettings, layer_config

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
SLIDING = "sliding_attention"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class LayerFormat(TableFormat):
    """architecture: the name in the config. drafter: our drafter class for the heads."""

    architecture: ClassVar[str]
    drafter: ClassVar[type[HeadsDrafter]]
    allowed_keys = TOKEN_IDS

    @abstractmethod
    def kind_expected(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the expected values of the settings that differ between kinds."""

    def expected_settings(self, config: dict[str, Any]) -> dict[str, Any]:
        return {
            "architectures": [self.architecture],
            "num_hidden_layers": is_count,
            **dict.fromkeys(SIZES, is_count),
            "rms_norm_eps": is_positive,
            "rope_theta": is_positive,
            "rope_parameters": lambda x: isinstance(x, dict) and is_positive(x.get("rope_theta")),
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": lambda x: x in DTYPE_NAMES,
            "dtype": config.get("torch_dtype"),
            **self.kind_expected(config),
        }

    def size(self, config: dict[str, Any]) -> str:
        layers = config["num_hidden_layers"]
        return "one decoder layer" if layers == 1 else f"{layers} decoder layers"


def window_settings(window: int | None, layers: int) -> dict[str, Any]:
    """Return the settings of layers that see a window of the text; nothing without a window."""
    if window is None:
        return {}
    return {"layer_types": [SLIDING] * layers, "sliding_window": window}


def expected_window(config: dict[str, Any]) -> dict[str, Any]:
    """Return the expected values of `window_settings`, for `key_problems`."""
    if "sliding_window" not in config:
        return {}
    layers = config.get("num_hidden_layers") or 0
    return {
        "layer_types": lambda x: x == [SLIDING] * layers,
        "sliding_window": is_count,
    }


def unusual_layer(config: dict[str, Any], target: Target) -> LayerSettings | None:
    """Return the settings of an exported layer in which it differs from the target's."""
    stored = LayerSettings(**{name: config[name] for name in LayerSettings.model_fields})
    return LayerSettings.difference(layer_config(target.model, stored), layer_config(target.model))


def llama_settings(config: LlamaConfig, architecture: str, dtype: str) -> dict[str, Any]:
    """Return the contents of config.json for a layer, without a format's extra settings."""
    rope: Any = config.rope_parameters
    settings = {
        "architectures": [architecture],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **{name: getattr(config, name) for name in SIZES},
        "rms_norm_eps": config.rms_norm_eps,
        # rope_theta is for readers that use transformers 4.
        "rope_theta": rope["rope_theta"],
        "rope_parameters": dict(rope),
        "hidden_act": config.hidden_act,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    ids = {name: getattr(config, name) for name in TOKEN_IDS}
    return settings | {name: number for name, number in ids.items() if number is not None}
