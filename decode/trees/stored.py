"""The tree a drafter directory is stored with: its drafter's shape where none is asked for."""

import shutil
from pathlib import Path
from typing import Any

from decode.artifact import MANIFEST, verify_directory, write_directory
from decode.trees.static import Static
from decode.trees.structure import Structure

TREE = "tree.json"


def stored_shape(path: Path) -> Static | None:
    """The shape stored in a drafter directory, its children being the likeliest tokens; None where
    there is none. Raises UserError for a file that holds no tree."""
    return Static(file=str(path / TREE)) if (path / TREE).exists() else None


def store_tree(path: Path, tree: Structure, about: dict[str, Any]) -> None:
    """Give the drafter directory `path` this tree in the place of the one it has, if any: the
    directory and its manifest are written anew, whole or not at all.

    about: how the tree came to be; JSON values. Raises UserError (CorruptArtifact), with nothing
    changed, where the directory is not what its manifest says.
    """
    meta = verify_directory(path)

    def fill(directory: Path) -> None:
        kept = shutil.ignore_patterns(MANIFEST, TREE)
        shutil.copytree(path, directory, ignore=kept, dirs_exist_ok=True)
        tree.save(directory / TREE, about)

    write_directory(path, fill, meta=meta)
