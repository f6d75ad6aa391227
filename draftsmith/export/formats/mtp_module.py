"""The target's checkpoint with a trained module of multi-token prediction (2412.19437) in it.

The tensors have the names of the target's family. Only the files that hold the module are written
again; the bits of all other tensors stay. vLLM and SGLang read such a module from the target's own
directory, and so does `--drafter mtp`.
"""

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from decode.base.artifact import MANIFEST
from decode.base.device import dtype_name
from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.model.loading import DTYPES, Target
from decode.model.pretrained import explained
from decode.model.without_weights import load_shapes
from draftsmith.export.file_schema import DTYPE_NAMES, read_json
from draftsmith.export.formats import (
    EXPORT_FILE,
    FORMATS,
    ExportJob,
    Format,
    ImportJob,
    Restored,
    export_facts,
)
from draftsmith.export.formats.hugging_face import key_notes
from draftsmith.export.formats.published_keys import HARMLESS
from draftsmith.export.model_directory import README
from draftsmith.export.published import Checkpoint
from heads.heads_directory import make_ready
from heads.mtp_checkpoint import (
    COPIES,
    INDEX,
    Layout,
    check_module,
    checkpoint_directory,
    has_module,
    module_heads,
    mtp_layout_of,
    named_as_stored,
    own_layers,
    read_module,
    stored_module,
)
from heads.mtp_drafter import MtpDrafter

CONFIG = "config.json"
# The file of a module in a checkpoint of several files that had none.
ADDED = "model-mtp.safetensors"


class MtpModule(Format):
    """The target's files, with the module's tensors replaced or added, and its number of layers in
    config.json."""

    name = "mtp"
    kinds: ClassVar[tuple[str, ...]] = ("mtp",)
    vllm = {"method": "mtp"}
    needs_target = True
    depth_option = "depth"

    def write(self, job: ExportJob, directory: Path) -> dict[str, Any]:
        target = job.loaded_target
        heads: Any = job.drafter.heads(self.name, target)
        layout = mtp_layout_of(target.model.config, target.name)
        source = checkpoint_directory(target)
        old = stored_module(source, layout, own_layers(target.model))
        new = named_as_stored(heads, target.model, heads.state_dict())
        other = sorted(name for name in old if name not in new and not name.endswith(COPIES))
        if other:
            raise UserError(
                f"the checkpoint {source} has {other[0]}, which the module of these heads has not; "
                "expected the checkpoint that the heads were made for"
            )
        usual = job.dtype or dtype_name(target.dtype)
        kept = {name: x.dtype for name, x in old.items() if x.dtype in DTYPE_NAMES.values()}
        names = {stored: name for name, stored in DTYPE_NAMES.items()}
        stored = {
            name: x.detach().to(DTYPES[names[kept[name]] if name in kept else usual]).contiguous()
            for name, x in new.items()
        }
        places = {name: old[name].file.name for name in stored if name in old}
        _copy(source, directory, set(places.values()))
        _write_tensors(source, directory, stored, places)
        _name_layers(directory, layout, len(heads.layers))
        return {
            "dtype": names[next(iter(kept.values()))] if kept else usual,
            "parameters": sum(x.numel() for x in stored.values()),
            "size": f"a module of {len(heads.layers)} layers in its target's checkpoint",
        }

    def problems(self, directory: Path) -> list[str]:
        try:
            target = load_shapes(str(directory))
            found = check_module(target, module_heads(target, {}), directory)
        except UserError as error:
            return [str(error)]
        broken = []
        for name, stored in found.items():
            with safe_open(stored.file, framework="pt") as opened:
                if not opened.get_tensor(name).isfinite().all():
                    broken.append(f"{name} has values that are NaN or infinite")
        return broken

    def reload(self, directory: Path, target: Target) -> Drafter:
        heads = read_module(target, {"depth": export_facts(directory)["max_depth"]}, directory)
        make_ready(heads, target, target.dtype)
        return MtpDrafter(heads, target.vocab_size)

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """A model of a family whose module is known, with a tensor of it."""
        return has_module(checkpoint.config, checkpoint.names)

    def restored(self, job: ImportJob) -> Restored:
        options = {} if job.depth is None else {"depth": job.depth}
        heads = read_module(job.target, options, job.checkpoint.directory)
        count, layout = len(heads.layers), mtp_layout_of(job.target.model.config, job.target.name)
        notes = [
            f"the checkpoint has a module of {count} layer{'s' if count > 1 else ''}: "
            f"{sum(x.numel() for x in heads.parameters()):,} parameters",
            *key_notes(job, (layout.count or "", f"text_config.{layout.count}")),
            *_different_settings(job),
        ]
        return Restored.of_heads(heads, job.target, notes)

    def serving(self, target: str, repository: str, gamma: int) -> list[tuple[str, str, str]]:
        own = f"draftsmith generate --target {repository} --drafter mtp:depth={gamma} 'A question'"
        return [*super().serving(repository, repository, gamma), ("draftsmith", "", own)]


def _different_settings(job: ImportJob) -> list[str]:
    """A note on the settings in which the checkpoint differs from the target, whose are used."""
    with explained(f"{job.checkpoint.source}: its {CONFIG} cannot be read"):
        theirs = AutoConfig.for_model(**job.checkpoint.config).get_text_config().to_dict()
    ours = job.target.model.config.get_text_config().to_dict()
    names = [key for key in ours.keys() - HARMLESS if theirs.get(key) != ours[key]]
    if not names:
        return []
    return [f"its config differs from the target's, which is used, in {', '.join(sorted(names))}"]


def _copy(source: Path, directory: Path, rewritten: set[str]) -> None:
    """Copy the target's files, but for those that are written again."""
    ours = {README, MANIFEST, EXPORT_FILE}
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name not in rewritten | ours and not file.name.startswith("."):
            shutil.copyfile(file, directory / file.name)


def _write_tensors(
    source: Path, directory: Path, tensors: dict[str, Tensor], places: dict[str, str]
) -> None:
    """Write the files that hold the tensors. places: the file of each that the checkpoint has.

    Others go to the only file, or to a new one that the index names.
    """
    index = read_json(source / INDEX)
    only = next(iter(sorted(source.glob("*.safetensors")))).name
    added = {name: ADDED if index else only for name in tensors if name not in places}
    places = places | added
    for name in sorted(set(places.values())):
        weights: dict[str, Tensor] = {}
        metadata = {"format": "pt"}
        if (source / name).exists():
            weights = load_file(source / name)
            with safe_open(source / name, framework="pt") as opened:
                metadata = opened.metadata() or metadata
        weights |= {each: x for each, x in tensors.items() if places[each] == name}
        save_file(weights, directory / name, metadata)
    if index and added:
        index["weight_map"] |= added
        about = index.setdefault("metadata", {})
        if "total_size" in about:
            about["total_size"] += sum(tensors[name].nbytes for name in added)
        (directory / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _name_layers(directory: Path, layout: Layout, layers: int) -> None:
    """Have config.json say how many layers the module has, if the family says so there."""
    if layout.count is None:
        return
    config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    text = config.get("text_config") or config
    if text.get(layout.count) != layers:
        text[layout.count] = layers
        (directory / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")


FORMATS.register("mtp")(MtpModule())
