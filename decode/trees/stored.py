"""The tree stored in a drafter directory: the drafter's default shape."""

import shutil
from pathlib import Path
from typing import Any

from decode.artifact import MANIFEST, verify_directory, write_directory
from decode.trees.static import Static
from decode.trees.structure import Structure

TREE = "tree.json"


def stored_shape(path: Path) -> Static | None:
    """The shape stored in a drafter directory, with the likeliest tokens as children. None if there
    is no such file. Raises UserError if the file is not a tree."""
    return Static(file=str(path / TREE)) if (path / TREE).exists() else None


def store_tree(path: Path, tree: Structure, about: dict[str, Any]) -> None:
    """Stores this tree in the drafter directory `path`, in place of an existing one. The directory
    and its manifest are rewritten atomically.

    about: how the tree was made, as JSON values. Raises UserError (CorruptArtifact) if the
    directory does not match its manifest, and then changes nothing.
    """
    meta = verify_directory(path)

    def fill(directory: Path) -> None:
        kept = shutil.ignore_patterns(MANIFEST, TREE)
        shutil.copytree(path, directory, ignore=kept, dirs_exist_ok=True)
        tree.save(directory / TREE, about)

    write_directory(path, fill, meta=meta)
