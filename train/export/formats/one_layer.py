"""Drafters that are one decoder layer of a llama, and what engines need beside it: EAGLE's.

`config.json` is a llama's of one layer, `model.safetensors` its weights. H hidden size, V
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
from heads.base import HeadOptions
from heads.drafter import HeadsDrafter
from heads.store import stored_options
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
    """A kind of it says which tensors there are, and how the heads are made of them again.

    architecture: as the config names it. drafter: the heads as a drafter of ours.
    """

    architecture: ClassVar[str]
    drafter: ClassVar[type[HeadsDrafter]]
    needs_target = True

    def deepest(self, drafter: Path) -> int | None:
        options: Any = stored_options(drafter)
        return self.depth_of(options)

    @abstractmethod
    def depth_of(self, options: Any) -> int:
        """How deep heads with these options draft at most."""

    @abstractmethod
    def tensors(self, heads: Any, target: Target) -> dict[str, Tensor]:
        """What is written, by name; what the heads borrow of the target is at hand."""

    @abstractmethod
    def expected_tensors(self, config: dict[str, Any]) -> dict[str, TensorSpec]:
        """The tensors that a sound config asks for."""

    @abstractmethod
    def restored(
        self, weights: dict[str, Tensor], depth: int
    ) -> tuple[HeadOptions, Tensor | None, dict[str, Tensor]]:
        """Options, draft vocabulary and state of the heads, of what was written."""

    def extra_config(self, heads: Any) -> dict[str, Any]:
        """Settings that no llama has."""
        return {}

    def extra_keys(self) -> dict[str, Any]:
        """What is expected of them, as `key_problems` takes it."""
        return {}

    def wrong_values(self, config: dict[str, Any], weights: dict[str, Tensor]) -> list[str]:
        """What no shape shows."""
        return []

    def stored(self, config: dict[str, Any], heads: Any, job: ExportJob) -> dict[str, Any]:
        """What config.json is, of the llama's settings and the extra ones."""
        return config

    def flat(self, stored: dict[str, Any]) -> dict[str, Any]:
        """The `config` that was `stored`; whatever is not there is left out."""
        return stored

    def wrong_settings(self, stored: dict[str, Any]) -> list[str]:
        """What is wrong with config.json beside what `flat` gives."""
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
        # Layers to read, above all: each engine counts them in its own way.
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
        depth = json.loads((directory / EXPORT_FILE).read_text())["facts"]["deepest"]
        require_fit(config, directory, target)
        options, ids, state = self.restored(load_file(directory / WEIGHTS), depth)
        return drafter_of(self.drafter, options, ids, state, target)


def layer_specs(config: dict[str, Any], name: str, reads: int) -> dict[str, TensorSpec]:
    """The tensors of a decoder layer whose attention reads so many numbers, but for the norms of
    what it reads."""
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
    """A tensor of this shape in the dtype that the config names."""
    return TensorSpec(shape, (DTYPE_NAMES[config["torch_dtype"]],))


def _config(config: LlamaConfig, architecture: str, dtype: str) -> dict[str, Any]:
    rope: Any = config.rope_parameters
    found = {
        "architectures": [architecture],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **{name: getattr(config, name) for name in SIZES},
        "rms_norm_eps": config.rms_norm_eps,
        # The first for readers of transformers 4.
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
