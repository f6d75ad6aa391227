"""An adapter and its base as one drafter directory, of the base's kind."""

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from decode.base.artifact import MANIFEST, write_directory
from decode.base.errors import UserError
from decode.opening.adapters import CONFIG, KIND, base_of, read_adapter
from decode.opening.directory import DRAFTER_FILE, describe_drafter
from decode.shapes.static import TREE


def write_merged(adapter: Path, out: Path) -> None:
    """Write the drafter directory `out`: the files of the base, with the low-rank products added to
    its weights in float32. The weights keep their dtype.

    Raises UserError for a directory that is no adapter's, without its base, or with weights for a
    layer that the base does not have.
    """
    description = describe_drafter(adapter)
    if description["kind"] != KIND:
        raise UserError(
            f"{adapter} is a {description['kind']} drafter and no adapter, so there is nothing to "
            "merge; give the drafter/ directory of a stage with lora.merge: false"
        )
    base = base_of(adapter, description)
    merged = describe_drafter(base) | {"provenance": description["provenance"]}
    transposed = bool(
        json.loads((adapter / CONFIG).read_text(encoding="utf-8")).get("fan_in_fan_out")
    )
    parts = read_adapter(adapter, torch.float32)
    changes = {f"{name}.weight": part.second @ part.first for name, part in parts.items()}

    def fill(directory: Path) -> None:
        own = (MANIFEST, DRAFTER_FILE)
        shutil.copytree(base, directory, dirs_exist_ok=True, ignore=lambda *_: own)
        left = set(changes)
        for file in sorted(directory.glob("*.safetensors")):
            with safe_open(file, "pt") as stored:
                metadata = stored.metadata()
                weights = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            found = left & weights.keys()
            for name in found:
                change = changes[name].T if transposed else changes[name]
                weights[name] = (weights[name].float() + change).to(weights[name].dtype)
            if found:
                save_file(weights, file, metadata)
            left -= found
        if left:
            raise UserError(
                f"the files of {base} have no {min(left)}, which the adapter {adapter} changes; "
                "use the base that it was trained on"
            )
        if (adapter / TREE).exists():
            shutil.copy(adapter / TREE, directory / TREE)
        (directory / DRAFTER_FILE).write_text(json.dumps(merged, indent=2), encoding="utf-8")

    write_directory(out, fill)
