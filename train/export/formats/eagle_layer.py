"""EAGLE's layouts: one llama decoder layer, with the tensors that engines need.

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
from heads.layers.llama_layer import LayerSettings, layer_config
from train.export.checkpoint import Checkpoint, stored_tensors
from train.export.file_schema import (
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
from train.export.formats import (
    EXPORT_FILE,
    ExportJob,
    Format,
    ImportJob,
    Restored,
)
from train.export.formats.published_layer import (
    EMBEDDINGS,
    differences,
    embedding_problems,
    head_problems,
    plain_names,
    sound_settings,
)
from train.export.trained_drafter import (
    copy_to_cpu,
    heads_drafter,
    read_heads_for,
    rebuild_heads,
    require_fitting_target,
    stored_dtype,
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
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class EagleLayer(Format):
    """A subclass defines the tensors, and how to rebuild the heads from them.

    architecture: the name in the config. layer: the name of the decoder layer. drafter: our
    drafter class for the heads.
    """

    architecture: ClassVar[str]
    layer: ClassVar[str] = "layers.0"
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
    def rebuilt_heads(
        self, config: dict[str, Any], weights: dict[str, Tensor], depth: int | None
    ) -> tuple[HeadOptions, Tensor | None, dict[str, Tensor]]:
        """Rebuild the heads' options, draft vocabulary and state from config and weights. depth:
        None for the usual one."""

    def extra_config(self, heads: Any) -> dict[str, Any]:
        """Return the settings that a llama's config does not have."""
        return {}

    def extra_expected_keys(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the expected values of the extra settings, for `key_problems`."""
        return {}

    def published_config(
        self, contents: dict[str, Any], tensors: dict[str, Tensor]
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the extra settings of a published drafter, and the problems with them.

        contents: of its config. tensors: by the names of this format. May change `tensors` into
        those that this format writes."""
        return {}, []

    def captured(
        self, contents: dict[str, Any], target: Target, convention: str | None
    ) -> list[int] | None:
        """Return the captured layers that a config names, None for the usual ones. convention: what
        the numbers mean, None for what this layout means."""
        return None

    def value_problems(self, config: dict[str, Any], weights: dict[str, Tensor]) -> list[str]:
        """Return problems with values, which a check of shapes cannot find."""
        return []

    def config_file(self, config: dict[str, Any], heads: Any, job: ExportJob) -> dict[str, Any]:
        """Return the contents of config.json. config: the llama's settings and the extra ones."""
        return config

    def layer_config(self, contents: dict[str, Any]) -> dict[str, Any]:
        """Recover `config` from the result of `config_file`. Leaves out missing settings."""
        return contents

    def setting_problems(self, contents: dict[str, Any]) -> list[str]:
        """Return the problems with config.json outside the result of `layer_config`."""
        return []

    def write(self, job: ExportJob, directory: Path) -> dict[str, Any]:
        heads: Any = read_heads_for(self.name, job.drafter, job.loaded_target)
        dtype = job.dtype or stored_dtype(heads)
        weights = self.tensors(heads, job.loaded_target)
        save_file(copy_to_cpu(weights, dtype), directory / WEIGHTS)
        config = llama_settings(heads.config, self.architecture, dtype) | self.extra_config(heads)
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
        config = self.layer_config(contents)
        expected: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": "llama",
            "num_hidden_layers": 1,
            **dict.fromkeys(SIZES, is_count),
            "rms_norm_eps": is_positive,
            "rope_theta": is_positive,
            "rope_parameters": lambda x: isinstance(x, dict) and is_positive(x.get("rope_theta")),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": lambda x: x in DTYPE_NAMES,
            "dtype": config.get("torch_dtype"),
            **self.extra_expected_keys(config),
        }
        problems = self.setting_problems(contents) + key_problems(expected, config, "config.json")
        # Above all a list of captured layers: each engine counts layers differently.
        problems += extra_key_problems([*expected, *TOKEN_IDS], config, "config.json")
        if problems:
            return problems
        tensors, problems = read_tensors([directory / WEIGHTS])
        problems += tensor_problems(self.expected_tensors(config), tensors)
        return problems or self.value_problems(config, load_file(directory / WEIGHTS))

    def reload(self, directory: Path, target: Target) -> Drafter:
        config = self.layer_config(json.loads((directory / "config.json").read_text()))
        depth = json.loads((directory / EXPORT_FILE).read_text())["facts"]["max_depth"]
        require_fitting_target(config, directory, target)
        options, ids, state = self.rebuilt_heads(config, load_file(directory / WEIGHTS), depth)
        layer = unusual_layer(config, target)
        captured = self.captured(config, target, "inputs")
        return heads_drafter(self.drafter, _with(options, layer, captured), ids, state, target)

    def restored(self, job: ImportJob) -> Restored:
        target, checkpoint = job.target, job.checkpoint
        contents = self.layer_config(checkpoint.config)
        names = plain_names(checkpoint.tensors, self.layer)
        tensors = {ours: checkpoint.tensors[theirs] for ours, theirs in names.items()}
        layer, problems = sound_settings(contents, target)
        problems += embedding_problems(tensors, target)
        tensors.pop(EMBEDDINGS, None)
        extra, extra_problems = self.published_config(contents, tensors)
        problems += extra_problems
        # Sizes come first: with wrong ones, every tensor is wrong too.
        job.require(problems, self.name)
        captured = self.captured(contents, target, job.layer_ids)
        sizes = layer_config(target.model, layer)
        config = llama_settings(sizes, self.architecture, checkpoint.dtype) | extra
        expected = self.expected_tensors(config)
        for name in (EMBEDDINGS, *self.optional_tensors(config)):
            if name not in tensors:
                expected.pop(name, None)
        problems = head_problems(config, tensors, self.layer)
        problems += tensor_problems(expected, stored_tensors(tensors))
        job.require(problems or self.value_problems(config, tensors), self.name)
        depth = job.depth or self.published_depth(checkpoint)
        options, ids, state = self.rebuilt_heads(config, tensors, depth)
        heads = rebuild_heads(_with(options, layer, captured), ids, state, target)
        return Restored.of_heads(heads, target, differences(layer, captured))

    def optional_tensors(self, config: dict[str, Any]) -> tuple[str, ...]:
        """Return the tensors that a published drafter may leave out."""
        return ()

    def published_depth(self, checkpoint: Checkpoint) -> int | None:
        """Return the number of draft tokens that a published drafter names."""
        return None


def _with(
    options: HeadOptions, layer: LayerSettings | None, captured: list[int] | None
) -> HeadOptions:
    """Return options with what only the target tells: what the usual layer and layers are. Kinds
    that have no such options always read the usual ones."""
    changes = {"layer": layer, "captured_layers": captured}
    return options.model_copy(update={key: x for key, x in changes.items() if x is not None})


def unusual_layer(config: dict[str, Any], target: Target) -> LayerSettings | None:
    """Return the settings of an exported layer in which it differs from the target's."""
    stored = LayerSettings(**{name: config[name] for name in LayerSettings.model_fields})
    return LayerSettings.difference(layer_config(target.model, stored), layer_config(target.model))


def layer_tensors(config: dict[str, Any], name: str, input_size: int) -> dict[str, TensorSpec]:
    """Return the tensors of a decoder layer, without the norms before attention. input_size: of its
    attention."""
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
