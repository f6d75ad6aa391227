"""Heads as a drafter directory of draftsmith itself, in another dtype and with a README.

This is how a drafter is handed on to people who decode with draftsmith: half the bytes in bfloat16,
with the figures, the licence of its data and how it was trained. `--drafter DIRECTORY` opens it.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from decode.base.artifact import CorruptArtifact
from decode.base.device import dtype_name
from decode.base.errors import UserError
from decode.drafters import DRAFTERS, Drafter
from decode.drafters.trained import ShapedDrafter
from decode.model.loading import DTYPES, Target
from decode.model.model_names import EMBEDDED_PREFIX
from decode.opening.directory import DRAFTER_FILE
from decode.shapes import Chain
from decode.shapes.static import TREE
from draftsmith.export.file_schema import is_count, key_problems, read_json, read_tensors
from draftsmith.export.formats import FORMATS, ExportJob, Format
from draftsmith.export.trained_drafter import copy_to_cpu, without_directories
from heads.heads_directory import CONFIG, IDS, SAMPLE, WEIGHTS, stored_options
from heads.kinds import HEADS


class StoredHeads(Format):
    """The files of `heads.heads_directory`. A stored tree and a reduced draft vocabulary stay."""

    name = "draftsmith"
    kinds = tuple(HEADS)
    instead = {"small_lm": "a small LM is a plain model directory: use --format hf"}
    carries_vocabulary = True
    is_ours = True

    def write(self, job: ExportJob, directory: Path) -> dict[str, Any]:
        source = job.drafter.path
        weights = load_file(source / WEIGHTS)
        sample = weights.pop(SAMPLE)  # keeps its dtype: loading compares it bit by bit
        floats = [tensor for tensor in weights.values() if tensor.is_floating_point()]
        dtype = job.dtype or dtype_name(floats[0].dtype)
        save_file({**copy_to_cpu(weights, dtype), SAMPLE: sample}, directory / WEIGHTS)
        for name in (CONFIG, TREE):
            if (source / name).exists():
                shutil.copyfile(source / name, directory / name)
        described = without_directories(job.drafter.description)
        (directory / DRAFTER_FILE).write_text(json.dumps(described, indent=2), encoding="utf-8")
        return {
            "dtype": dtype,
            "kept": len(weights[IDS]) if IDS in weights else None,
            "parameters": sum(tensor.numel() for tensor in floats),
            "size": f"{job.drafter.kind} heads",
        }

    def problems(self, directory: Path) -> list[str]:
        config = read_json(directory / CONFIG)
        if config is None:
            return [f"{CONFIG} is missing or is not JSON"]
        expected = {
            "model_type": lambda x: x in self.kinds,
            "options": lambda x: isinstance(x, dict),
            "hidden_size": is_count,
            "vocab_size": is_count,
            "target_dtype": lambda x: x in DTYPES,
        }
        problems = key_problems(expected, config, CONFIG)
        if not problems:
            try:
                stored_options(directory)
            except (CorruptArtifact, UserError) as error:
                problems.append(str(error))
        if read_json(directory / DRAFTER_FILE) is None:
            problems.append(f"{DRAFTER_FILE} is missing or is not JSON")
        tensors, unreadable = read_tensors([directory / WEIGHTS])
        if not unreadable and SAMPLE not in tensors:
            problems.append(f"{WEIGHTS} has no {SAMPLE}, a sample of the target's weights")
        return problems + unreadable

    def reload(self, directory: Path, target: Target) -> Drafter:
        kind: Any = DRAFTERS[
            json.loads((directory / CONFIG).read_text(encoding="utf-8"))["model_type"]
        ]
        dtype = dtype_name(target.dtype)
        drafter: ShapedDrafter = kind.load(directory, target, dtype=dtype)
        return drafter.with_shape(Chain())

    def serving(self, target: str, repository: str, gamma: int) -> list[tuple[str, str, str]]:
        owner, _, local = repository.rpartition("/")
        download = f"hf download {repository} --local-dir {local}\n" if owner else ""
        drafter = repository if repository.startswith(EMBEDDED_PREFIX) else f"./{local}"
        use = f"draftsmith generate --target {target} --drafter {drafter} 'A question'"
        return [("draftsmith", "", download + use)]


FORMATS.register("draftsmith")(StoredHeads())
