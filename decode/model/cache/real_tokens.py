"""The tokens that a pass feeds: a list without padding.

Shapes: B rows, n columns, T tokens of the list.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from decode.base.device import to_device


class RealTokens:
    """Of the n columns of each row, its first counts[b], int [B], are tokens of its own. Only these
    are fed, those of a row one after the other. One row has some.

    rows, columns: int64 [T] on the host, where each token of the list is. bounds: int64 [B + 1],
    where the tokens of each row begin in the list, and its end.
    """

    def __init__(self, counts: np.ndarray, width: int, device: torch.device | None = None) -> None:
        self.counts, self.width, self._device = counts, width, device or torch.device("cpu")
        self.rows, self.columns = (np.arange(width) < counts[:, None]).nonzero()
        self.bounds = np.zeros(len(counts) + 1, dtype=np.int64)
        counts.cumsum(out=self.bounds[1:])

    def __len__(self) -> int:
        return len(self.rows)

    def flat(self, x: Tensor) -> Tensor:
        """Of values by row and column, [B, n, …], those of the list: [1, T, …]."""
        return x.flatten(0, 1)[self._sources.to(x.device)][None]

    def padded(self, x: Tensor) -> Tensor:
        """Values of the list, [1, T, …], by row and column: [B, n, …]. Padding repeats the last
        token of the row, or that of a row before it."""
        return x[0][self._places.to(x.device)]

    def places(self, columns: Tensor) -> Tensor:
        """Where some columns of each row, int64 [B, k], are in the list."""
        return self._places.gather(1, columns)

    @cached_property
    def _sources(self) -> Tensor:
        """int64 [T]: the place of each token among B·n columns."""
        return to_device(self.rows * self.width + self.columns, self._device)

    @cached_property
    def _places(self) -> Tensor:
        """int64 [B, n]: the place in the list of each column."""
        last = np.maximum(self.counts - 1, 0)[:, None]
        places = self.bounds[:-1, None] + np.minimum(np.arange(self.width), last)
        return to_device(np.minimum(places, len(self) - 1), self._device)


@dataclass(frozen=True)
class Listed:
    """Values of the tokens of a list, [1, T, …], in the place of [B, n, …] with padding."""

    values: Tensor
    real: RealTokens

    def padded(self) -> Tensor:
        """[B, n, …]; see `RealTokens.padded`."""
        return self.real.padded(self.values)

    def each(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """[B, n, …']: what a function makes of the values [T, …], one for each token."""
        return self.real.padded(function(self.values[0])[None])
