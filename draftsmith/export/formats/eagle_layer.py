"""EAGLE's layouts: one llama decoder layer, with the tensors that engines need.

`config.json` is that of a one-layer llama, `model.safetensors` holds the weights. H hidden size, V
vocabulary, V' draft vocabulary.
"""

import json
from abc import abstractmethod
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import load_file
from torch import Tensor

from decode.drafters import Drafter
from decode.model.loading import Target
from draftsmith.export.published import Checkpoint, renamed, stored_tensors
from draftsmith.export.file_schema import tensor_problems
from draftsmith.export.formats import EXPORT_FILE, ExportJob, ImportJob, Restored
from draftsmith.export.formats.layer_format import (
    LayerFormat,
    expected_window,
    llama_settings,
    unusual_layer,
    window_settings,
)
from draftsmith.export.formats.published_layer import (
    EMBEDDINGS,
    differences,
    embedding_problems,
    head_problems,
    plain_name,
    published_window,
    sound_settings,
    token_ids,
)
from draftsmith.export.formats.tensor_table import expected_tensors, read_state
from draftsmith.export.trained_drafter import (
    heads_drafter,
    rebuild_heads,
    require_fitting_target,
)
from heads.heads_module import HeadOptions
from heads.layers.layer_config import LayerSettings, layer_config


class EagleLayer(LayerFormat):
    """A subclass defines the tensors, and how to rebuild the heads from them.

    layer: the name of the decoder layer.
    """

    layer: ClassVar[str] = "layers.0"

    @abstractmethod
    def options(
        self,
        config: dict[str, Any],
        state: dict[str, Tensor],
        depth: dict[str, Any],
        target: Target,
    ) -> HeadOptions:
        """Rebuild the heads' options from the config and their state, which it may change. depth:
        the option that limits it; empty for the usual one."""

    def rebuilt_heads(
        self, config: dict[str, Any], tensors: dict[str, Tensor], depth: int | None, target: Target
    ) -> tuple[HeadOptions, Tensor | None, dict[str, Tensor]]:
        """Rebuild the heads' options, draft vocabulary and state from config and tensors. depth:
        None for the usual one."""
        state = read_state(self.table(config), tensors)
        ids = token_ids(tensors["d2t"]) if "d2t" in tensors else None
        named = {} if depth is None else {str(self.depth_option): depth}
        return self.options(config, state, named, target), ids, state

    def settings(self, heads: Any, dtype: str, job: ExportJob) -> dict[str, Any]:
        config = llama_settings(heads.config, self.architecture, dtype) | self.extra_config(heads)
        return config | window_settings(heads.options.window, config["num_hidden_layers"])

    def kind_expected(self, config: dict[str, Any]) -> dict[str, Any]:
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

    def published_config(
        self, contents: dict[str, Any], tensors: dict[str, Tensor]
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the extra settings of a published drafter, and the problems with them.

        contents: the contents of its config. tensors: by the names of this format. May change
        `tensors` into those that this format writes."""
        return {}, []

    def captured(
        self, contents: dict[str, Any], target: Target, convention: str | None
    ) -> list[int] | None:
        """Return the captured layers that a config names, None for the usual ones. convention: what
        the numbers mean, None for what this layout means."""
        return None

    def reload(self, directory: Path, target: Target) -> Drafter:
        config = self.stored_settings(json.loads((directory / "config.json").read_text()))
        depth = json.loads((directory / EXPORT_FILE).read_text())["facts"]["max_depth"]
        require_fitting_target(config, directory, target)
        weights = load_file(directory / self.weights)
        options, ids, state = self.rebuilt_heads(config, weights, depth, target)
        layer = unusual_layer(config, target)
        captured = self.captured(config, target, "inputs")
        options = _with(options, layer, captured, config.get("sliding_window"))
        return heads_drafter(self.drafter, options, ids, state, target)

    def restored(self, job: ImportJob) -> Restored:
        target, checkpoint = job.target, job.checkpoint
        contents = self.stored_settings(checkpoint.config)
        tensors, name_problems = renamed(checkpoint.tensors, partial(plain_name, layer=self.layer))
        layer, problems = sound_settings(contents, target, self.layer_count(contents))
        problems += name_problems + self.target_problems(contents, tensors, target)
        window, window_problems = published_window(contents)
        problems += window_problems
        extra, extra_problems = self.published_config(contents, tensors)
        problems += extra_problems
        # Sizes come first: with wrong ones, every tensor is wrong too.
        job.require(problems, self.name)
        captured = self.captured(contents, target, job.layer_ids)
        sizes = layer_config(target.model, layer)
        config = llama_settings(sizes, self.architecture, checkpoint.dtype) | extra
        table = [row for row in self.table(config) if row.name in tensors or not row.implied]
        expected = expected_tensors(table, checkpoint.dtype)
        problems = head_problems(config, tensors, self.layer)
        problems += tensor_problems(expected, stored_tensors(tensors))
        job.require(problems or self.value_problems(config, tensors), self.name)
        depth = job.depth or self.published_depth(checkpoint)
        options, ids, state = self.rebuilt_heads(config, tensors, depth, target)
        heads = rebuild_heads(_with(options, layer, captured, window), ids, state, target)
        return Restored.of_heads(heads, target, differences(layer, captured))

    def layer_count(self, contents: dict[str, Any]) -> int:
        """Return the number of decoder layers to expect of a published config."""
        return 1

    def target_problems(
        self, contents: dict[str, Any], tensors: dict[str, Tensor], target: Target
    ) -> list[str]:
        """Return the problems with what a published drafter shares with its target. Takes the
        embeddings out of its tensors, because heads borrow the target's."""
        problems = embedding_problems(tensors, target)
        tensors.pop(EMBEDDINGS, None)
        return problems

    def published_depth(self, checkpoint: Checkpoint) -> int | None:
        """Return the number of draft tokens that a published drafter names."""
        return None


def _with(
    options: HeadOptions,
    layer: LayerSettings | None,
    captured: list[int] | None,
    window: int | None,
) -> HeadOptions:
    """Return options with the window, and with what only the target tells: what the usual layer
    and layers are. Kinds that have no such options always read the usual ones."""
    changes = {"layer": layer, "captured_layers": captured, "window": window}
    return options.model_copy(update={key: x for key, x in changes.items() if x is not None})
