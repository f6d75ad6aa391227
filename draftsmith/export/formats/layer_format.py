"""Layouts of decoder layers: what those of EAGLE and those of block drafters share.

`config.json` is that of a llama of a few layers with a few settings more, `model.safetensors` holds
the weights.
"""

import json
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.model.loading import Target
from draftsmith.export.file_schema import DTYPE_NAMES, is_count, is_positive, tensor_problems
from draftsmith.export.formats import ExportJob, ImportJob, Restored, export_facts
from draftsmith.export.formats.published_keys import Keys
from draftsmith.export.formats.published_layer import (
    EMBEDDINGS,
    head_problems,
    ids_of_offsets,
    layer_differences,
    plain_name,
    published_window,
    row_problems,
    sound_settings,
    stated_tokens,
)
from draftsmith.export.formats.table_format import TableFormat
from draftsmith.export.formats.tensor_table import expected_tensors, read_state
from draftsmith.export.model_directory import older_rotation
from draftsmith.export.published import renamed, stored_tensors
from draftsmith.export.trained_drafter import heads_drafter, rebuild_heads, require_fitting_target
from heads.heads_drafter import HeadsDrafter
from heads.layers.layer_config import layer_config
from heads.options import HeadOptions, LayerSettings

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
    """architecture: the name in the config. drafter: our drafter class for the heads. layer: the
    name of the first layer. layer_ids: what the numbers of the target's layers in a config mean.
    published_keys: the keys of a published config that an import reads (`published_keys.py`).
    """

    architecture: ClassVar[str]
    drafter: ClassVar[type[HeadsDrafter]]
    layer: ClassVar[str] = "layers.0"
    layer_ids: ClassVar[str] = "inputs"
    allowed_keys = TOKEN_IDS
    published_keys: ClassVar[Keys]

    def settings(self, heads: Any, dtype: str, job: ExportJob) -> dict[str, Any]:
        config = llama_settings(heads.config, self.architecture, dtype) | self.extra_config(heads)
        return config | window_settings(heads.options.window, config["num_hidden_layers"])

    def kind_expected(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the expected values of the settings that differ between kinds."""
        usual = {"model_type": "llama", "num_hidden_layers": 1, "mlp_bias": False}
        if self.holds_windows:
            usual |= expected_window(config)
        return usual | self.extra_expected_keys(config)

    def extra_config(self, heads: Any) -> dict[str, Any]:
        """Return the settings that a llama's config does not have."""
        return {}

    def extra_expected_keys(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the expected values of the extra settings, for `key_problems`."""
        return {}

    def expected_settings(self, config: dict[str, Any]) -> dict[str, Any]:
        return {
            "architectures": [self.architecture],
            "num_hidden_layers": is_count,
            **dict.fromkeys(SIZES, is_count),
            "rms_norm_eps": is_positive,
            "rope_parameters": lambda x: isinstance(x, dict) and is_positive(x.get("rope_theta")),
            **older_rotation(config.get("rope_parameters") or {}),
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

    @abstractmethod
    def options(
        self, config: dict[str, Any], state: dict[str, Tensor], target: Target
    ) -> dict[str, Any]:
        """Return the options of the heads. config: a sound config. state: the state of the heads;
        may be changed into the one that these options need."""

    def read_layers(
        self, contents: dict[str, Any], target: Target, convention: str | None
    ) -> dict[str, Any]:
        """Return the option that names the target's layers which are read, if a config needs it.
        convention: what the numbers mean, None for what they mean in this layout."""
        return {}

    def rebuilt(
        self,
        config: dict[str, Any],
        tensors: dict[str, Tensor],
        target: Target,
        *,
        depth: int | None,
        **others: Any,
    ) -> tuple[HeadOptions, Tensor | None, dict[str, Tensor]]:
        """Rebuild the heads' options, draft vocabulary and state. depth: None for the usual one.
        others: options that the config does not tell alone; None for the usual ones."""
        state = read_state(self.table(config), tensors)
        ids = ids_of_offsets(tensors["d2t"]) if "d2t" in tensors else None
        options = {"type": self.kinds[0], **self.options(config, state, target)}
        if self.depth_option:
            others[self.depth_option] = depth
        named = {name: value for name, value in others.items() if value is not None}
        return HeadOptions.of(options | named), ids, state

    def reload(self, directory: Path, target: Target) -> Drafter:
        config = self.stored_settings(
            json.loads((directory / "config.json").read_text(encoding="utf-8"))
        )
        require_fitting_target(config, directory, target)
        options, ids, state = self.rebuilt(
            config,
            load_file(directory / self.weights),
            target,
            depth=export_facts(directory)["max_depth"],
            layer=unusual_layer(config, target),
            window=config.get("sliding_window"),
            **self.read_layers(config, target, self.layer_ids),
        )
        return heads_drafter(self.drafter, options, ids, state, target)

    def published_settings(self, contents: dict[str, Any]) -> dict[str, Any]:
        """Return the settings that `settings` has, of a published config."""
        return self.stored_settings(contents)

    def tensor_name(self, name: str) -> str | None:
        """Return the name of a published tensor in this layout; None if it is not needed."""
        return plain_name(name, self.layer)

    def published_config(
        self, job: ImportJob, contents: dict[str, Any], tensors: dict[str, Tensor]
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the extra settings of a published drafter, and the problems with them.

        contents: the contents of its config. tensors: by the names of this format. May change
        `tensors` into those that this format writes."""
        return {}, []

    def layer_count(self, contents: dict[str, Any]) -> Any:
        """Return the number of decoder layers to expect of a published config."""
        return 1

    def target_problems(
        self, contents: dict[str, Any], tensors: dict[str, Tensor], target: Target
    ) -> list[str]:
        """Return the problems with what a published drafter shares with its target. Takes the
        embeddings out of its tensors, because heads borrow the target's: others would be lost."""
        table = target.model.get_input_embeddings().weight.detach()
        return row_problems(EMBEDDINGS, tensors.pop(EMBEDDINGS, None), table, "embeddings")

    def restored(self, job: ImportJob) -> Restored:
        target, checkpoint = job.target, job.checkpoint
        contents = self.published_settings(checkpoint.config)
        tensors, name_problems = renamed(checkpoint.tensors, self.tensor_name)
        count = self.layer_count(contents)
        layer, problems = sound_settings(contents, target, count)
        if is_count(count) and count > len(tensors):
            problems.append(
                f"config.json names {count} layers, but there are {len(tensors)} tensors"
            )
        problems += name_problems + self.target_problems(contents, tensors, target)
        window, window_problems = published_window(contents)
        extra, extra_problems = self.published_config(job, contents, tensors)
        problems += window_problems + extra_problems
        problems += job.key_problems(self.published_keys)
        # Sizes come first: with wrong ones, every tensor is wrong too.
        job.require(problems, self.name)
        layers = self.read_layers(contents, target, job.layer_ids)
        sizes = layer_config(target.model, layer)
        config = llama_settings(sizes, self.architecture, checkpoint.dtype) | extra
        table = [row for row in self.table(config) if row.name in tensors or not row.implied]
        expected = expected_tensors(table, checkpoint.dtype)
        problems = head_problems(config, tensors, self.layer)
        problems += tensor_problems(expected, stored_tensors(tensors))
        job.require(problems or self.value_problems(config, tensors), self.name)
        depth = job.depth or stated_tokens(checkpoint.config)
        options, ids, state = self.rebuilt(
            config, tensors, target, depth=depth, layer=layer, window=window, **layers
        )
        heads = rebuild_heads(options, ids, state, target)
        if job.depth not in (None, heads.depth):
            raise UserError(
                f"--depth is {job.depth}, but {checkpoint.source} drafts blocks of {heads.depth} "
                "tokens; leave it out"
            )
        notes = layer_differences(layer, layers.get("captured_layers"))
        return Restored.of_heads(heads, target, notes)


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
        "rope_parameters": dict(rope),
        **older_rotation(rope),
        "hidden_act": config.hidden_act,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    ids = {name: getattr(config, name) for name in TOKEN_IDS}
    return settings | {name: number for name, number in ids.items() if number is not None}
