"""The structure of a tree that is the same in every round: its nodes as paths of ranks.

The notation is Medusa's (2401.10774): [0] is the likeliest token after the text, [1] the second
likeliest, and [0, 2] the third likeliest after [0]. N is the number of nodes without the root (the
last committed token).
"""

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from decode.base.artifact import read_versioned, write_file
from decode.base.errors import UserError

FORMAT = 1


class Structure:
    """Nodes sorted by depth, then by path, so that a cut at any depth leaves a prefix.

    paths: lists of ranks ≥ 0, in any order. Raises UserError for a path that is empty, is repeated,
    or has no parent path.
    """

    def __init__(self, paths: Iterable[Sequence[int]]) -> None:
        nodes = _paths(paths)
        distinct = set(nodes)
        if len(distinct) < len(nodes):
            twice = next(path for path in nodes if nodes.count(path) > 1)
            raise UserError(f"a tree has the path {list(twice)} twice; list each node once")
        for path in nodes:
            if len(path) > 1 and path[:-1] not in distinct:
                raise UserError(
                    f"a tree has the path {list(path)} without its parent {list(path[:-1])}; "
                    "add the parent or leave both out"
                )
        self.paths = sorted(nodes, key=lambda path: (len(path), path))

    @classmethod
    def of_widths(cls, widths: Sequence[int]) -> "Structure":
        """A tree where every node at depth d = 0, 1, … has widths[d] ≥ 1 children: SpecInfer's
        expansion configuration (2305.09781).

        >>> Structure.of_widths([2, 1]).paths
        [(0,), (1,), (0, 0), (1, 0)]
        """
        if not _whole_numbers(widths) or not len(widths) or min(widths) < 1:
            raise UserError(f"tree widths {widths!r}; expected a list of whole numbers ≥ 1")
        layer: list[tuple[int, ...]] = [()]
        paths = []
        for width in widths:
            layer = [(*path, rank) for path in layer for rank in range(width)]
            paths += layer
        return cls(paths)

    @classmethod
    def load(cls, path: Path | str) -> "Structure":
        """Loads a file written by `save`. Raises UserError if the file is not a tree."""
        remedy = "write one with draftsmith calibrate-tree"
        stored = read_versioned(Path(path), FORMAT, ["paths"], "a tree structure", remedy)
        return cls(stored["paths"])

    def save(self, path: Path | str, about: dict[str, Any] | None = None) -> None:
        """Writes JSON atomically. about: how the tree was made, as JSON values."""
        stored = {"format": FORMAT, "paths": self.paths, "about": about or {}}
        write_file(Path(path), json.dumps(stored, indent=2))

    def __len__(self) -> int:
        return len(self.paths)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self.paths == other.paths

    def __repr__(self) -> str:
        return f"Structure({[list(path) for path in self.paths]})"

    @cached_property
    def depths(self) -> np.ndarray:
        """int [N], 1 for the root's children."""
        return np.array([len(path) for path in self.paths], dtype=np.int64)

    @cached_property
    def parents(self) -> np.ndarray:
        """int [N], −1 for the root's children."""
        index = {path: node for node, path in enumerate(self.paths)} | {(): -1}
        return np.array([index[path[:-1]] for path in self.paths], dtype=np.int64)

    @cached_property
    def ranks(self) -> np.ndarray:
        """int [N]: the rank of each node's token among the drafter's likeliest, from 0."""
        return np.array([path[-1] for path in self.paths], dtype=np.int64)

    @cached_property
    def orders(self) -> np.ndarray:
        """int [N]: the number of earlier siblings of each node. Equal to the rank if no rank is
        left out."""
        child_counts: dict[int, int] = {}
        orders = []
        for parent in self.parents.tolist():
            orders.append(child_counts.get(parent, 0))
            child_counts[parent] = orders[-1] + 1
        return np.array(orders, dtype=np.int64)

    @property
    def depth(self) -> int:
        return len(self.paths[-1]) if self.paths else 0

    def within(self, depth: int) -> int:
        """The number of nodes at most `depth` deep. They are the first ones."""
        return int(np.searchsorted(self.depths, depth, side="right"))

    def ancestors(self) -> np.ndarray:
        """bool [N, N]: [i, j] is true if node j is node i or one of its ancestors."""
        seen = np.eye(len(self), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                seen[node] |= seen[parent]
        return seen


def _whole_numbers(values: object) -> bool:
    return isinstance(values, Sequence) and all(
        isinstance(value, int) and not isinstance(value, bool) for value in values
    )


def _paths(paths: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
    if not isinstance(paths, Iterable):
        raise UserError(f"tree paths are {paths!r}; expected a list of lists of ranks")
    nodes = []
    for path in paths:
        if not _whole_numbers(path) or not len(path) or min(path) < 0:
            raise UserError(
                f"a tree has the path {path!r}; expected a list of ranks (whole numbers ≥ 0), one "
                "for each depth, such as [0, 2]"
            )
        nodes.append(tuple(path))
    return nodes
