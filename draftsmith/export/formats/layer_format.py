"""Layouts of decoder layers: what those of EAGLE and those of block drafters share.

`config.json` is that of a model of a few layers, `model.safetensors` holds the weights. H hidden
size, V vocabulary.
"""

import json
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from decode.model.loading import Target
from draftsmith.export.file_schema import (
    DTYPE_NAMES,
    TensorSpec,
    extra_key_problems,
    is_count,
    is_positive,
    key_problems,
    read_json,
    read_tensors,
    tensor_problems,
)
from draftsmith.export.formats import ExportJob, Format
from draftsmith.export.trained_drafter import copy_to_cpu, stored_dtype
from heads.heads_drafter import HeadsDrafter
from heads.layers.layer_config import LayerSettings, layer_config

WEIGHTS = "model.safetensors"
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


class LayerFormat(Format):
    """A subclass defines config and tensors.

    architecture: the name in the config. drafter: our drafter class for the heads.
    """

    architecture: ClassVar[str]
    drafter: ClassVar[type[HeadsDrafter]]
    needs_target = True

    @abstractmethod
    def settings(self, heads: Any, dtype: str, target: Target) -> dict[str, Any]:
        """Return the config: a layer's settings and those of the kind."""

    @abstractmethod
    def expected_settings(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the expected values of the settings that differ between kinds, for
        `key_problems`."""

    @abstractmethod
    def tensors(self, heads: Any, target: Target) -> dict[str, Tensor]:
        """Return the tensors to write, by name. The heads have already borrowed the target's
        modules."""

    @abstractmethod
    def expected_tensors(self, config: dict[str, Any]) -> dict[str, TensorSpec]:
        """Return the tensors that a sound config requires."""

    def value_problems(self, config: dict[str, Any], weights: dict[str, Tensor]) -> list[str]:
        """Return problems with values, which a check of names and shapes cannot find."""
        return []

    def config_file(self, config: dict[str, Any], heads: Any, job: ExportJob) -> dict[str, Any]:
        """Return the contents of config.json. config: the result of `settings`."""
        return config

    def stored_settings(self, contents: dict[str, Any]) -> dict[str, Any]:
        """Recover `settings` from the result of `config_file`. Leaves out missing settings."""
        return contents

    def setting_problems(self, contents: dict[str, Any]) -> list[str]:
        """Return the problems with config.json outside the result of `stored_settings`."""
        return []

    def write(self, job: ExportJob, directory: Path) -> dict[str, Any]:
        target = job.loaded_target
        heads: Any = job.drafter.heads(self.name, target)
        dtype = job.dtype or stored_dtype(heads)
        weights = self.tensors(heads, target)
        save_file(copy_to_cpu(weights, dtype), directory / WEIGHTS)
        config = self.settings(heads, dtype, target)
        contents = self.config_file(config, heads, job)
        (directory / "config.json").write_text(json.dumps(contents, indent=2))
        ids = heads.vocabulary
        is_filled = ids is not None and not self.carries_vocabulary
        layers = config["num_hidden_layers"]
        return {
            "dtype": dtype,
            "kept": None if ids is None else len(ids),
            "filled_from": "the target's output layer" if is_filled else None,
            "parameters": sum(x.numel() for x in weights.values() if x.is_floating_point()),
            "size": "one decoder layer" if layers == 1 else f"{layers} decoder layers",
        }

    def problems(self, directory: Path) -> list[str]:
        contents = read_json(directory / "config.json")
        if contents is None:
            return ["config.json is missing or is not JSON"]
        config = self.stored_settings(contents)
        expected: dict[str, Any] = {
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
            **self.expected_settings(config),
        }
        problems = self.setting_problems(contents) + key_problems(expected, config, "config.json")
        # Above all a list of captured layers: each engine counts layers differently.
        problems += extra_key_problems([*expected, *TOKEN_IDS], config, "config.json")
        if problems:
            return problems
        tensors, problems = read_tensors([directory / WEIGHTS])
        problems += tensor_problems(self.expected_tensors(config), tensors)
        return problems or self.value_problems(config, load_file(directory / WEIGHTS))


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


def layer_tensors(config: dict[str, Any], name: str, input_size: int) -> dict[str, TensorSpec]:
    """Return the tensors of a decoder layer, without the norms before attention. input_size: the
    input size of its attention."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = (
        config[heads] * config["head_dim"]
        for heads in ("num_attention_heads", "num_key_value_heads")
    )
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (queries, input_size),
        "self_attn.k_proj": (keys, input_size),
        "self_attn.v_proj": (keys, input_size),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return {f"{name}.{part}.weight": weight_spec(config, *shape) for part, shape in shapes.items()}


def weight_spec(config: dict[str, Any], *shape: int) -> TensorSpec:
    """Return the spec of a tensor of this shape, in the config's dtype."""
    return TensorSpec(shape, (DTYPE_NAMES[config["torch_dtype"]],))


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
