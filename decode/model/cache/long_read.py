"""Texts are read in passes: long ones, and texts of different lengths. Other passes may come in
between.

Shapes: B rows, n tokens of the longest text, V vocabulary, H hidden size.
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from torch import Tensor

from decode.base.device import to_device
from decode.model.cache.fed_rows import pads_little


class FeedsSlots(Protocol):
    """A model over slots: see the members of `CachedLM` with these names."""

    @property
    def features(self) -> Mapping[int, Tensor]: ...

    @property
    def pads(self) -> bool: ...

    def pass_limit(self, length: int) -> int: ...

    def forward(
        self,
        ids_BN: Tensor,
        start: np.ndarray,
        *,
        columns: np.ndarray,
        counts: np.ndarray,
        first: int,
    ) -> Tensor: ...


class LongRead:
    """Texts that a model reads into the slots of its rows, one pass at a time.

    ids_BN, start, counts, first: as for `CachedLM.read`. Between two passes the model may feed
    other rows. Where the model pads, and would pad much, one text is read after the other.
    logits: [B, 1, V], those after each row's last token, once it is `done`; for a row without
    tokens they mean nothing. None before the first pass.
    """

    def __init__(
        self,
        lm: FeedsSlots,
        ids_BN: Tensor,
        start: np.ndarray,
        counts: np.ndarray,
        first: int = 0,
    ) -> None:
        self._first = first
        self._lm, self._ids, self._start, self._counts = lm, ids_BN, start, counts
        rows, width = ids_BN.shape
        self._groups = [slice(0, rows)]  # the rows that passes feed together, those in turn first
        if lm.pads and not pads_little(counts, width):
            self._groups = [slice(row, row + 1) for row in np.flatnonzero(counts).tolist()]
        self._begin = 0  # the column of the next pass
        # Of each pass: its rows, its columns and the hidden states.
        self._passes: list[tuple[slice, slice, Mapping[int, Tensor]]] = []
        self.logits: Tensor | None = None

    @property
    def done(self) -> bool:
        """Whether all tokens are read."""
        return not self._groups

    @property
    def left(self) -> int:
        """How many tokens are not read yet, over all rows."""
        now, later = self._groups[:1], self._groups[1:]
        begun = sum(int(np.maximum(self._counts[rows] - self._begin, 0).sum()) for rows in now)
        return begun + sum(int(self._counts[rows].sum()) for rows in later)

    def read_on(self, tokens: int) -> int:
        """One pass over at most this number of tokens of some rows together, but at least one of
        each of these rows that has some left, and at most `CachedLM.pass_limit`. Returns how many
        were fed, without padding."""
        lm, begin, group = self._lm, self._begin, self._groups[0]
        live = group.start + np.flatnonzero(self._counts[group] > begin)
        rows = slice(int(live[0]), int(live[-1]) + 1)
        counts, start = self._counts[rows], self._start[rows]
        left, last = np.maximum(counts - begin, 0), np.maximum(counts - 1, 0)
        # Masks have room for the rows between those that are fed.
        limit = min(tokens, lm.pass_limit(int((start + counts).max())))
        width = min(int(left.max()), max(limit // len(counts), 1))
        fed = np.minimum(left, width)
        logits = lm.forward(
            self._ids[rows, begin : begin + width],
            start + begin,
            columns=np.clip(last[:, None] - begin, 0, width - 1),
            counts=fed,
            first=self._first + rows.start,
        )
        self._passes.append((rows, slice(begin, begin + width), lm.features))
        self._begin = begin + width
        if self._begin >= int(counts.max()):
            self._groups, self._begin = self._groups[1:], 0
        if self.logits is None and self.done and len(logits) == len(self._counts):
            self.logits = logits
        elif self.logits is None:
            self.logits = logits.new_zeros(len(self._counts), *logits.shape[1:])
        if self.logits is not logits:
            reached = np.flatnonzero((begin <= last) & (last < begin + width))
            at, those = (to_device(x, logits.device) for x in (rows.start + reached, reached))
            self.logits[at] = logits[those]
        return int(fed.sum())

    def features(self) -> Mapping[int, Tensor]:
        """The hidden states of all passes, of each captured layer, [B, n, H]."""
        ((_, _, first), *others), shape = self._passes, self._ids.shape
        if not others and all(x.shape[:2] == shape for x in first.values()):
            return first
        every = {layer: x.new_zeros(*shape, x.shape[2]) for layer, x in first.items()}
        for rows, columns, features in self._passes:
            for layer, x in features.items():
                every[layer][rows, columns] = x
        return every
