"""Writes the adapters of a drafter in training as a directory of their own."""

import os
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from decode.base.artifact import weights_sha256
from decode.model.loading import Target
from decode.opening.adapters import KIND, WEIGHTS
from decode.opening.directory import describe_drafter, save_drafter
from distill.trainable_model import Trainable


def save_adapter(
    directory: Path,
    trained: Trainable,
    weights: dict[str, Tensor],
    base: Path,
    *,
    target: Target,
    provenance: dict[str, Any],
) -> None:
    """Write a drafter directory with the adapters alone, in the files of peft.

    weights: the values of the trained weights. base: the drafter directory that the training began
    with. Its path is stored relative to `directory`, so both can be moved together.
    """
    path = os.path.relpath(base.resolve(), directory.resolve())
    named = {
        "path": path,
        "kind": describe_drafter(base)["kind"],
        "weights_sha256": weights_sha256(base),
    }

    def write(files: Path) -> None:
        config, state = trained.adapter(weights)
        config.base_model_name_or_path = path
        config.save_pretrained(files)
        save_file({name: x.cpu().contiguous() for name, x in state.items()}, files / WEIGHTS)

    save_drafter(directory, KIND, write, target=target, provenance=provenance, base=named)
