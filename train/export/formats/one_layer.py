"""Layouts of EAGLE's drafters: one llama decoder layer, and the tensors that engines need with it.

`config.json` is that of a one-layer llama, `model.safetensors` holds the weights. H hidden size, V
vocabulary, V' draft vocabulary.
"""

import json
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from decode.drafters import Drafter
from decode.target.loading import Target
from heads.heads_directory import stored_options
from heads.heads_drafter import HeadsDrafter
from heads.heads_module import HeadOptions
from train.export.formats import EXPORT_FILE, ExportJob, Format
from train.export.formats.of_heads import as_stored, drafter_of, heads_of, require_fit
from train.export.tensors import (
    DTYPE_NAMES,
    TensorSpec,
    key_problems,
    number,
    read_json,
    safetensors_found,
    tensor_problems,
    whole,
)

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


class OneLayer(Format):
    """A subclass defines the tensors, and how to rebuild the heads from them.

    architecture: the name in the config. drafter: our drafter class for the heads.
    """

    architecture: ClassVar[str]
    drafter: ClassVar[type[HeadsDrafter]]
    needs_target = True

    def max_depth(self, drafter: Path) -> int | None:
        options: Any = stored_options(drafter)
        return self.depth_of(options)

    @abstractmethod
    def depth_of(self, options: Any) -> int:
        """Return the max depth of heads with these options."""

    @abstractmethod
    def tensors(self, heads: Any, target: Target) -> dict[str, Tensor]:
        """Return the tensors to write, by name. The heads have already borrowed the target's
        modules."""

    @abstractmethod
    def expected_tensors(self, config: dict[str, Any]) -> dict[str, TensorSpec]:
        """Return the tensors that a sound config requires."""

    @abstractmethod
    def restored(
        self, weights: dict[str, Tensor], depth: int
    ) -> tuple[HeadOptions, Tensor | None, dict[str, Tensor]]:
        """Rebuild the heads' options, draft vocabulary and state from the written weights."""

    def extra_config(self, heads: Any) -> dict[str, Any]:
        """Return the settings that a llama's config does not have."""
        return {}

    def extra_keys(self) -> dict[str, Any]:
        """Return the expected values of the extra settings, for `key_problems`."""
        return {}

    def wrong_values(self, config: dict[str, Any], weights: dict[str, Tensor]) -> list[str]:
        """Return problems with values, which a check of shapes cannot find."""
        return []

    def stored(self, config: dict[str, Any], heads: Any, job: ExportJob) -> dict[str, Any]:
        """Return the contents of config.json. config: the llama's settings and the extra ones."""
        return config

    def flat(self, stored: dict[str, Any]) -> dict[str, Any]:
        """Recover `config` from the result of `stored`. Leaves out missing settings."""
        return stored

    def wrong_settings(self, stored: dict[str, Any]) -> list[str]:
        """Return the problems with config.json outside the result of `flat`."""
        return []

    def refuse(self, job: ExportJob) -> None:
        return None

    def write(self, job: ExportJob, directory: Path) -> dict[str, Any]:
        heads: Any = heads_of(job, self.name)
        assert job.target is not None
        dtype = job.dtype or "float32"
        weights = self.tensors(heads, job.target)
        save_file(as_stored(weights, dtype), directory / WEIGHTS)
        config = _config(heads.config, self.architecture, dtype) | self.extra_config(heads)
        stored = self.stored(config, heads, job)
        (directory / "config.json").write_text(json.dumps(stored, indent=2))
        ids = heads.vocabulary
        filled = ids is not None and not self.carries_vocabulary
        return {
            "dtype": dtype,
            "kept": None if ids is None else len(ids),
            "filled_from": "the target's output layer" if filled else None,
            "parameters": sum(x.numel() for x in weights.values() if x.is_floating_point()),
            "size": "one decoder layer",
        }

    def problems(self, directory: Path) -> list[str]:
        stored = read_json(directory / "config.json")
        if stored is None:
            return ["config.json is missing or no JSON"]
        config = self.flat(stored)
        expected: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": "llama",
            "num_hidden_layers": 1,
            **dict.fromkeys(SIZES, whole),
            "rms_norm_eps": number,
            "rope_theta": number,
            "rope_parameters": lambda x: isinstance(x, dict) and number(x.get("rope_theta")),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": lambda x: x in DTYPE_NAMES,
            "dtype": config.get("torch_dtype"),
            **self.extra_keys(),
        }
        ids = {"bos_token_id", "eos_token_id", "pad_token_id"}
        problems = self.wrong_settings(stored) + key_problems(expected, config, "config.json")
        # Above all a list of captured layers: each engine counts layers differently.
        problems += [
            f"config.json has {key}, which is not expected"
            for key in sorted(config.keys() - expected.keys() - ids)
        ]
        if problems:
            return problems
        found, problems = safetensors_found([directory / WEIGHTS])
        problems += tensor_problems(self.expected_tensors(config), found)
        return problems or self.wrong_values(config, load_file(directory / WEIGHTS))

    def reload(self, directory: Path, target: Target) -> Drafter:
        config = self.flat(json.loads((directory / "config.json").read_text()))
        depth = json.loads((directory / EXPORT_FILE).read_text())["facts"]["max_depth"]
        require_fit(config, directory, target)
        options, ids, state = self.restored(load_file(directory / WEIGHTS), depth)
        return drafter_of(self.drafter, options, ids, state, target)


def layer_specs(config: dict[str, Any], name: str, reads: int) -> dict[str, TensorSpec]:
    """Return the tensors of a decoder layer, without the norms before attention. reads: the input
    size of its attention."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    wide, narrow = (
        config[heads] * config["head_dim"]
        for heads in ("num_attention_heads", "num_key_value_heads")
    )
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (wide, reads),
        "self_attn.k_proj": (narrow, reads),
        "self_attn.v_proj": (narrow, reads),
        "self_attn.o_proj": (hidden, wide),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return {f"{name}.{part}.weight": of_weights(config, *shape) for part, shape in shapes.items()}


def of_weights(config: dict[str, Any], *shape: int) -> TensorSpec:
    """Return the spec of a tensor of this shape, in the config's dtype."""
    return TensorSpec(shape, (DTYPE_NAMES[config["torch_dtype"]],))


def _config(config: LlamaConfig, architecture: str, dtype: str) -> dict[str, Any]:
    rope: Any = config.rope_parameters
    found = {
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
    ids = {name: getattr(config, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return found | {f"{name}_token_id": x for name, x in ids.items() if x is not None}
