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
from decode.model.cache.fed_rows import PADDING, pads_little


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
        # The hidden states of each pass: those of its rows, each part with the first of them.
        self._passes: list[list[tuple[int, Mapping[int, Tensor]]]] = []
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
        ends if much would be padding, and leaves out rows that have nothing left (`_runs`).
        Returns how many were fed, with the padding."""
        begin, last = self._begin, self._last
        left = last + 1 - begin
        live = np.flatnonzero(left > 0)
        limit = self._lm.pass_limit(int((self._start + self._counts).max()))
        width = width_of_pass(left[live], max(min(tokens, limit) // len(live), 1))
        runs = _runs(live, width)
        parts = [(rows.start, *self._fed(rows, begin + width)) for rows in runs]
        self._passes.append([(first, features) for first, _, features in parts])
        self._begin = begin + width
        if self.logits is None:
            ((_, logits, _),) = parts  # in the first pass are all rows
            self.logits = logits if self.done else logits.clone()
        else:
            for first, logits, _ in parts:
                ends = last[first : first + len(logits)]
                reached = np.flatnonzero((begin <= ends) & (ends < self._begin))
                at, those = (to_device(x, logits.device) for x in (first + reached, reached))
                self.logits[at] = logits[those]
        return width * sum(rows.stop - rows.start for rows in runs)

    def _fed(self, rows: slice, end: int) -> tuple[Tensor, Mapping[int, Tensor]]:
        """Feed the columns up to `end` of these rows. Returns the logits after each row's last
        token in them, and the hidden states."""
        lm, begin, last = self._lm, self._begin, self._last[rows]
        with lm.only(rows.start, rows.stop) if len(last) < len(self._last) else nullcontext():
            logits = lm.forward(
                self._ids[rows, begin:end],
                self._start[rows] + begin,
                columns=np.clip(last[:, None] - begin, 0, end - begin - 1),
                ends=self._start[rows] + np.clip(self._counts[rows], begin, end),
            )
            return logits, lm.features

    def features(self) -> Mapping[int, Tensor]:
        """The hidden states of all passes, of each captured layer, [B, n, H]."""
        rows, ((_, first), *_) = len(self._last), self._passes[0]
        if len(self._passes) == 1:
            return first
        return {
            layer: torch.cat(
                [_whole([(at, x[layer]) for at, x in parts], rows) for parts in self._passes], 1
            )
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


def _runs(live: np.ndarray, width: int) -> list[slice]:
    """The rows that a pass of `width` tokens feeds: those that have tokens left, int [n], and rows
    between them where that pads little."""
    gaps = np.flatnonzero((np.diff(live) - 1) * width > PADDING)
    return [slice(int(rows[0]), int(rows[-1]) + 1) for rows in np.split(live, gaps + 1)]


def _whole(parts: list[tuple[int, Tensor]], rows: int) -> Tensor:
    """The values of some rows, each part with its first row, as those of all rows. The others are
    zeros."""
    x = parts[0][1]
    if len(x) == rows:
        return x
    whole = x.new_zeros(rows, *x.shape[1:])
    for first, values in parts:
        whole[first : first + len(values)] = values
    return whole
