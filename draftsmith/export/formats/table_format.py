"""What all layouts of heads in safetensors share: `config.json` beside one file of weights.

A layout states its settings and, as rows of a table, its tensors (`tensor_table`). Here they are
written and checked.
"""

import json
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.model.loading import Target
from draftsmith.export.file_schema import (
    extra_key_problems,
    key_problems,
    read_json,
    read_tensors,
    tensor_problems,
)
from draftsmith.export.formats import ExportJob, Format
from draftsmith.export.formats.published_layer import EMBEDDINGS, vocabulary_maps
from draftsmith.export.formats.tensor_table import (
    OWN_OUTPUT,
    TensorRow,
    expected_tensors,
    written_tensors,
)
from draftsmith.export.trained_drafter import copy_to_cpu, stored_dtype


class TableFormat(Format):
    """A subclass defines config and tensors.

    weights: the name of the file of weights. allowed_keys: settings that may be there or not.
    """

    weights: ClassVar[str] = "model.safetensors"
    allowed_keys: ClassVar[tuple[str, ...]] = ()
    needs_target = True

    @abstractmethod
    def settings(self, heads: Any, dtype: str, job: ExportJob) -> dict[str, Any]:
        """Return the config."""

    @abstractmethod
    def expected_settings(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the expected values of the settings, for `key_problems`."""

    @abstractmethod
    def table(self, config: dict[str, Any]) -> list[TensorRow]:
        """Return the tensors that a sound config requires."""

    @abstractmethod
    def size(self, config: dict[str, Any]) -> str:
        """Return the size of the heads in words."""

    def state(self, heads: Any, target: Target) -> dict[str, Tensor]:
        """Return the heads' state, with what readers need beside it. The heads have already
        borrowed the target's modules."""
        return dict(heads.state_dict())

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
        contents = self.config_file(self.settings(heads, dtype, job), heads, job)
        config = self.stored_settings(contents)
        shared = {
            EMBEDDINGS: target.model.get_input_embeddings().weight,
            OWN_OUTPUT: heads.output.of(1)[0],
            **vocabulary_maps(heads.vocabulary, target.vocab_size),
        }
        weights = written_tensors(self.table(config), self.state(heads, target), shared)
        save_file(copy_to_cpu(weights, dtype), directory / self.weights)
        (directory / "config.json").write_text(json.dumps(contents, indent=2), encoding="utf-8")
        ids = heads.vocabulary
        is_filled = ids is not None and not self.carries_vocabulary
        return {
            "dtype": dtype,
            "kept": None if ids is None else len(ids),
            "filled_from": "the target's output layer" if is_filled else None,
            "parameters": sum(x.numel() for x in weights.values() if x.is_floating_point()),
            "size": self.size(config),
        }

    def problems(self, directory: Path) -> list[str]:
        contents = read_json(directory / "config.json")
        if contents is None:
            return ["config.json is missing or is not JSON"]
        config = self.stored_settings(contents)
        expected = self.expected_settings(config)
        problems = self.setting_problems(contents) + key_problems(expected, config, "config.json")
        # Above all a list of captured layers: each engine counts layers differently.
        problems += extra_key_problems([*expected, *self.allowed_keys], config, "config.json")
        if problems:
            return problems
        tensors, problems = read_tensors([directory / self.weights])
        specs = expected_tensors(self.table(config), config["torch_dtype"])
        problems += tensor_problems(specs, tensors)
        return problems or self.value_problems(config, load_file(directory / self.weights))
