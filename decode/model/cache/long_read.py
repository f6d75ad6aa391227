"""Texts are read in passes: long ones, and texts of different lengths. Other passes may come in
between.

Shapes: B rows, n tokens of the longest text, V vocabulary, H hidden size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from decode.base.device import to_device
from decode.model.cache.pass_size import pads_little


@dataclass(frozen=True)
class ReadPart:
    """What a pass reads of some texts: counts[b], int [B], of the tokens `ids`, int64 [B, n], of
    the rows `rows`, into the slots from `start`, int [B]. take: gets the logits after the last of
    them, [B, 1, V], and the hidden states of each captured layer, [B, n, H]."""

    rows: slice
    ids: Tensor
    start: np.ndarray
    counts: np.ndarray
    take: Callable[[Tensor, Mapping[int, Tensor]], None]


class LongRead:
    """Texts that a model reads into the slots of its rows, one pass at a time.

    ids_BN, start, counts: as for `CachedLM.read`. Between two passes the model may feed other
    rows, and rows before these may leave. Where the model `pads`, and would pad much, one text is
    read after the other.
    logits: [B, 1, V], those after each row's last token, once none is `left`; for a row without
    tokens they mean nothing. None before the first pass.
    """

    def __init__(
        self, ids_BN: Tensor, start: np.ndarray, counts: np.ndarray, *, pads: bool
    ) -> None:
        self._ids, self._start, self._counts = ids_BN, start, counts
        self._apart = pads and not pads_little(counts, ids_BN.shape[1])
        self._read = np.zeros_like(counts)  # of each row; the same of all that passes feed together
        # Of each pass: its rows, its columns and the hidden states.
        self._passes: list[tuple[slice, slice, Mapping[int, Tensor]]] = []
        self.logits: Tensor | None = None

    @property
    def left(self) -> int:
        """How many tokens are not read yet, over all rows."""
        return int((self._counts - self._read).sum())

    @property
    def rows(self) -> slice:
        """Those that the next pass feeds; a row between them may have nothing left."""
        live = np.flatnonzero(self._read < self._counts)
        return slice(int(live[0]), int(live[0 if self._apart else -1]) + 1)

    @property
    def longest(self) -> int:
        """The slots of the longest text that the next pass reads."""
        return int((self._start + self._counts)[self.rows].max())

    def part(self, tokens: int, first: int = 0) -> ReadPart:
        """What the next pass reads: at most this number of tokens of some rows together, but at
        least one of each of these rows that has some left. first: the row of the first text."""
        rows = self.rows
        left, begin = (self._counts - self._read)[rows], int(self._read[rows.start])
        width = min(int(left.max()), max(tokens // len(left), 1))
        return ReadPart(
            slice(first + rows.start, first + rows.stop),
            self._ids[rows, begin : begin + width],
            self._start[rows] + begin,
            np.minimum(left, width),
            partial(self._take, rows, slice(begin, begin + width)),
        )

    def _take(
        self, rows: slice, columns: slice, logits: Tensor, features: Mapping[int, Tensor]
    ) -> None:
        """What a pass gave for these columns of these rows."""
        counts = self._counts[rows]
        self._passes.append((rows, columns, features))
        self._read[rows] = np.minimum(counts, columns.stop)
        if self.logits is None:
            self.logits = logits.new_zeros(len(self._counts), *logits.shape[1:])
        reached = np.flatnonzero((columns.start < counts) & (counts <= columns.stop))
        at, those = (to_device(x, logits.device) for x in (rows.start + reached, reached))
        self.logits[at] = logits[those]

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
