"""The target of a drafter that was trained together with it (Medusa-2, 2401.10774, section 2.2.2).

Such a drafter works only with that new model, so the model is exported too: as a plain model
directory, which every engine reads.
"""

import shutil
from pathlib import Path
from typing import Any

from decode.artifact import MANIFEST, verify_directory, write_directory
from decode.errors import UserError
from train.export.formats.hf import for_older_readers, model_problems
from train.export.tensors import read_json

README = "README.md"


def has_backbone(description: dict[str, Any]) -> bool:
    """Whether a drafter was trained together with its target. description: the drafter's."""
    return bool((description.get("provenance") or {}).get("drift"))


def find_backbone(drafter: Path, given: str | None) -> Path:
    """Return the directory of such a drafter's target: `given`, else the one that its stage wrote.
    Raises UserError if it does not exist, is damaged or is not a complete model."""
    found = Path(given).expanduser() if given else drafter.resolve().parent / "target"
    if not found.is_dir():
        raise UserError(
            f"{drafter} was trained together with its target, and {found} is not there: it is the "
            "target/ directory that its stage wrote beside drafter/. Name it with --target DIR"
        )
    if (found / MANIFEST).exists():
        verify_directory(found)
    problems = model_problems(found)
    if problems:
        listed = "\n".join(f"- {problem}" for problem in problems)
        raise UserError(f"{found}, the target of {drafter}, is no sound model directory:\n{listed}")
    return found


def write_backbone(found: Path, out: Path, card: str) -> None:
    """Copy a model directory, completely or not at all, and add the settings that older readers
    need."""

    def fill(directory: Path) -> None:
        for file in sorted(found.iterdir()):
            if file.is_file() and file.name not in (MANIFEST, README):
                shutil.copyfile(file, directory / file.name)
        config: Any = read_json(directory / "config.json")
        for_older_readers(directory, config["dtype"])
        (directory / README).write_text(card)

    write_directory(out, fill)
