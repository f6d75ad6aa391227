"""Texts are read in passes: long ones, and texts of different lengths. Other passes may come in
between.

Shapes: B rows, n tokens of the longest text, V vocabulary, H hidden size.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from decode.base.device import to_device
from decode.model.cache.fed_rows import pads_little


class FeedsSlots(Protocol):
    """A model over slots: see the members of `CachedLM` with these names."""

    @property
    def features(self) -> Mapping[int, Tensor]: ...

    def pass_limit(self, length: int) -> int: ...

    def only(self, first: int, end: int) -> AbstractContextManager[None]: ...

    def forward(
        self, ids_BN: Tensor, start: np.ndarray, *, columns: np.ndarray, ends: np.ndarray
    ) -> Tensor: ...


class LongRead:
    """Texts that a model reads into the slots of its fed rows, one pass at a time.

    ids_BN, start, counts: as for `CachedLM.read`. Between two passes the model may feed other rows.
    logits: [B, 1, V], those after each row's last token, once it is `done`; for a row without
    tokens they mean nothing. None before the first pass.
    """

    def __init__(
        self, lm: FeedsSlots, ids_BN: Tensor, start: np.ndarray, counts: np.ndarray
    ) -> None:
        self._lm, self._ids, self._start, self._counts = lm, ids_BN, start, counts
        self._last = np.maximum(counts - 1, 0)
        self._begin = 0  # the column of the next pass
        self._parts: list[tuple[int, Mapping[int, Tensor]]] = []  # each with its first row
        self.logits: Tensor | None = None

    @property
    def done(self) -> bool:
        """Whether all tokens are read."""
        return self._begin > int(self._last.max())

    @property
    def left(self) -> int:
        """How many tokens are not read yet, over all rows."""
        return int(np.maximum(self._counts - self._begin, 0).sum())

    def read_on(self, tokens: int) -> int:
        """One pass over at most this number of tokens of all rows together, but at least one of
        each row that has some left, and at most `CachedLM.pass_limit`. It ends where a shorter row
        ends if much would be padding. Returns how many were fed, with the padding."""
        lm, begin, last = self._lm, self._begin, self._last
        # From the first row that has tokens left to the last one.
        live = np.flatnonzero(last >= begin)
        rows = slice(int(live[0]), int(live[-1]) + 1)
        count = rows.stop - rows.start
        limit = lm.pass_limit(int((self._start + self._counts).max()))
        left = last[rows] + 1 - begin
        width = width_of_pass(left, max(min(tokens, limit) // count, 1))
        end = begin + width
        with lm.only(rows.start, rows.stop) if count < len(last) else nullcontext():
            logits = lm.forward(
                self._ids[rows, begin:end],
                self._start[rows] + begin,
                columns=np.clip(last[rows, None] - begin, 0, width - 1),
                ends=self._start[rows] + np.clip(self._counts[rows], begin, end),
            )
        self._parts.append((rows.start, lm.features))
        self._begin = end
        if self.done and len(self._parts) == 1:
            self.logits = logits
            return count * width
        if self.logits is None:
            self.logits = logits.new_zeros(len(last), 1, logits.shape[2])
        reached = np.flatnonzero((begin <= last[rows]) & (last[rows] < end))
        self.logits[to_device(rows.start + reached, logits.device)] = logits[
            to_device(reached, logits.device)
        ]
        return count * width

    def features(self) -> Mapping[int, Tensor]:
        """The hidden states of all passes, of each captured layer, [B, n, H]."""
        rows, (_, first) = len(self._last), self._parts[0]
        if len(self._parts) == 1:
            return first
        return {
            layer: torch.cat([_with_rows(part[layer], at, rows) for at, part in self._parts], 1)
            for layer in first
        }


def width_of_pass(left: np.ndarray, most: int) -> int:
    """How many tokens of each row a pass feeds: at most `most`, and as many as the longest row has
    left, or as the longest one has with which it pads little.

    left: int [B], the tokens that each row has left; one has some.

    >>> width_of_pass(np.array([100, 90, 400]), 1000)
    100
    """
    ends = np.unique(np.minimum(left[left > 0], most)).tolist()
    return max((end for end in ends if pads_little(np.minimum(left, end), end)), default=ends[0])


def _with_rows(x: Tensor, first: int, rows: int) -> Tensor:
    """x as the rows from `first` on, of `rows` rows. The others are zeros."""
    if len(x) == rows:
        return x
    whole = x.new_zeros(rows, *x.shape[1:])
    whole[first : first + len(x)] = x
    return whole
