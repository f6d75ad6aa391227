"""Which rows the next pass feeds, of all rows that keep something, and with how much padding."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np

# The most padding of a pass: in tokens of all rows together, or of each row if that is more. More
# passes cost about as much.
PADDING, ROW_PADDING = 64, 8


class FedRows(ABC):
    """Base of what keeps something for each row: keys and values, or running states."""

    _fed = slice(0, 0)

    def only(self, first: int, end: int) -> AbstractContextManager[None]:
        """Inside this context, only rows first … end−1 are fed: of all rows, or in another such
        context, of the rows that are fed there."""
        fed = self._fed
        begin, end = fed.start + first, fed.start + end
        if (begin, end) == (fed.start, fed.stop):
            return nullcontext()
        return self._only(begin, end)

    @contextmanager
    def _only(self, begin: int, end: int) -> Iterator[None]:
        before = self._fed
        self._look_up(begin, end)
        try:
            yield
        finally:
            self._look_up(before.start, before.stop)

    @abstractmethod
    def _look_up(self, first: int, end: int) -> None:
        """Feed rows first … end−1 of all rows from now on."""


def pads_little(counts: np.ndarray, width: int) -> bool:
    """Whether one pass may feed `width` tokens of each row, of which counts, int [B], are no
    padding."""
    return width * len(counts) - int(counts.sum()) <= max(PADDING, ROW_PADDING * len(counts))
