"""State that an object keeps of each row of a batch. The object declares it once, in `per_row`.

`per_row` maps the name of an attribute to what it holds for a new row:

- a number, or an array of any shape S: the attribute is an array [B] or [B, S];
- a function of the new rows' `Contexts` that returns an array or a list with one entry for each:
  the attribute is of the same kind.

`begin`, `keep` and `add` then do for all attributes what rows do: begin, leave and join.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np


class KeepsRows(Protocol):
    """An object with state of each row."""

    @property
    def per_row(self) -> Mapping[str, Any]: ...


def begin(owner: KeepsRows, count: int, contexts: Any = None) -> None:
    """`count` rows begin, and all earlier ones are forgotten. contexts: their texts."""
    for name, first in owner.per_row.items():
        setattr(owner, name, _new(first, count, contexts))


def count(owner: KeepsRows) -> int:
    """How many rows it has state of."""
    return len(getattr(owner, next(iter(owner.per_row))))


def keep(owner: KeepsRows, rows: np.ndarray) -> None:
    """Keep only these rows, int [B'], in this order."""
    for name in owner.per_row:
        old = getattr(owner, name)
        setattr(owner, name, [old[row] for row in rows] if isinstance(old, list) else old[rows])


def add(owner: KeepsRows, count: int, contexts: Any = None) -> None:
    """`count` rows join, after the others. contexts: their texts."""
    for name, first in owner.per_row.items():
        old, new = getattr(owner, name), _new(first, count, contexts)
        setattr(owner, name, old + new if isinstance(old, list) else np.concatenate([old, new]))


def _new(first: Any, count: int, contexts: Any) -> Any:
    if callable(first):
        return first(contexts)
    value = np.asarray(first)
    return np.broadcast_to(value, (count, *value.shape)).copy()
