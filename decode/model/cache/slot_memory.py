"""The memory of slots, and copies of rows out of it.

On a CPU, a row takes memory for the slots that its text has reached, not for all that it may reach:
the system gives a page of memory when it is written first, and until then it reads as zeros. So
nothing here writes further than a text.

Shapes: R allocated rows, N or M slots of a row, C slots in all, H heads, D head size.
"""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from decode.base.device import to_device

# Rows whose lengths are in the same block of slots are moved together.
MOVED_SLOTS = 256


class SlotMemory:
    """The keys of all layers, or the values, [R, H, C, D] per layer, for R allocated rows. They are
    in one tensor, so one gather moves a path in all layers. A layer with a different shape, dtype
    or device than the first one has a separate tensor, and so have the hidden states of a captured
    layer, whose numbers follow those of the layers."""

    def __init__(self, layers: int, rows: int, capacity: int) -> None:
        self._layers, self._rows, self._capacity = layers, rows, capacity
        self._tensors: list[Tensor] = []  # [n, R, H, C, D]
        self._index: dict[int, tuple[int, int]] = {}  # layer: (tensor, index in it)

    def make(self, layer: int, like: Tensor) -> None:
        """Allocate memory for a layer. like: keys or values of this layer, [·, H, ·, D]."""
        shape = (self._rows, like.shape[1], self._capacity, like.shape[3])
        if not self._tensors:
            self._tensors.append(_zeros(like, self._layers, *shape))
        first = self._tensors[0]
        alike = first.shape[1:] == shape and first.dtype == like.dtype
        if layer < self._layers and alike and first.device == like.device:
            self._index[layer] = 0, layer
        else:
            self._index[layer] = len(self._tensors), 0
            self._tensors.append(_zeros(like, 1, *shape))

    @property
    def states(self) -> int:
        """How many of the tensors, the last ones, are of hidden states."""
        return sum(layer >= self._layers for layer in self._index)

    def has(self, layer: int) -> bool:
        """Whether memory was allocated for a layer."""
        return layer in self._index

    def of(self, layer: int) -> Tensor:
        """The keys or values of a layer, [R, H, C, D]."""
        tensor, index = self._index[layer]
        return self._tensors[tensor][index]

    def first_rows(self, rows: int) -> dict[int, Tensor]:
        """By layer, the keys or values of the first rows, [rows, H, C, D]."""
        every = [x[:, :rows] for x in self._tensors]
        return {layer: every[tensor][index] for layer, (tensor, index) in self._index.items()}

    def move(self, rows: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Copy slots, each of a row to another slot of that row: int64 [T] each. No target is read
        after it was written."""
        for x in self._tensors:
            rows, source, target = (y.to(x.device) for y in (rows, sources, targets))
            x[:, rows, :, target] = x[:, rows, :, source]

    def keep_rows(self, rows: np.ndarray, written: np.ndarray) -> None:
        """Move the rows that stay to the front, where they are not there already. written: int [R],
        how many slots each row has written; the others of a moved row are zeros after that.

        This copies one layer at a time: a copy of all layers would be a second cache in memory."""
        moved = np.flatnonzero(rows != np.arange(len(rows)))
        if not len(moved):
            return
        ends, old = written[rows[moved]], written[moved]
        blocks = -(-ends // MOVED_SLOTS)
        groups = [np.flatnonzero(blocks == block) for block in np.unique(blocks)]
        # The rows that lose the same slots, by these slots.
        lost = {
            (begin, end): moved[(ends == begin) & (old == end)]
            for begin, end in zip(ends.tolist(), old.tolist(), strict=True)
            if begin < end
        }
        for x in self._tensors:
            parts = [
                (to_device(rows[moved[of]], x.device), to_device(moved[of], x.device), ends[of])
                for of in groups
            ]
            for layer in x:
                copies = [layer[:, :, : end.max()].index_select(0, s) for s, _, end in parts]
                for (_, target, end), copied in zip(parts, copies, strict=True):
                    layer[:, :, : end.max()].index_copy_(0, target, copied)
            for (begin, end), alike in lost.items():
                x[:, to_device(alike, x.device), :, begin:end] = 0

    def copy(self, rows_B1: Tensor, slots_BN: Tensor) -> list[Tensor]:
        """A copy of these slots."""
        return [x[:, rows_B1.to(x.device), :, slots_BN.to(x.device)] for x in self._tensors]

    def write(self, rows_B1: Tensor, slots_BN: Tensor, copied: Sequence[Tensor]) -> None:
        """Write a copy back. Tensors that did not exist yet get zeros."""
        for x, old in zip_longest(self._tensors, copied, fillvalue=0.0):
            assert isinstance(x, Tensor)
            x[:, rows_B1.to(x.device), :, slots_BN.to(x.device)] = old

    def reserve(self, rows: int, capacity: int, kept: int, written: np.ndarray) -> None:
        """Have memory for this number of rows and slots. The first `kept` rows stay, and the others
        get zeros: a row that left may have had NaN, and 0·NaN is NaN. `capacity` never gets
        smaller. written: as for `keep_rows`."""
        grows = (rows, capacity) != (self._rows, self._capacity)
        self._rows, self._capacity = rows, capacity
        for i, x in enumerate(self._tensors):
            if not grows:
                for row in range(kept, rows):
                    x[:, row, :, : written[row]] = 0
                continue
            layers, _, heads, _, size = x.shape
            new = _zeros(x, layers, rows, heads, capacity, size)
            for row in range(kept):
                new[:, row, :, : written[row]] = x[:, row, :, : written[row]]
            self._tensors[i] = new

    def take(self, row: int, count: int) -> "RowStates":
        """A copy of the first `count` slots of a row."""
        return RowStates([x[:, row, :, :count].clone() for x in self._tensors], dict(self._index))

    def put(self, row: int, states: "RowStates", count: int) -> None:
        """Write the first `count` slots of a row."""
        if not self._tensors:
            for x in states.tensors:
                layers, heads, _, size = x.shape
                shape = layers, self._rows, heads, self._capacity, size
                self._tensors.append(_zeros(x, *shape))
            self._index = dict(states.index)
        for x, new in zip(self._tensors, states.tensors, strict=True):
            x[:, row, :, :count] = new[:, :, :count]

    @property
    def token_bytes(self) -> int:
        """The bytes of one slot of one row, in all layers."""
        return sum(x.nbytes // max(x.shape[1] * x.shape[3], 1) for x in self._tensors)


@dataclass
class RowStates:
    """Of one row, as in a `SlotMemory`: the tensors [n, H, count, D], and which layer is where."""

    tensors: list[Tensor]
    index: dict[int, tuple[int, int]]


@dataclass
class SlotStates:
    """Keys and values of the first `count` tokens of one row, copied out of the slots."""

    keys: RowStates
    values: RowStates
    count: int

    def first(self, count: int) -> "SlotStates":
        """The slots of fewer tokens. Shares the memory."""
        return SlotStates(self.keys, self.values, count)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for states in (self.keys, self.values) for x in states.tensors)


def _zeros(like: Tensor, *shape: int) -> Tensor:
    """Zeros in memory of their own. Zeros, not empty: a masked slot is multiplied by a weight of 0,
    and 0·NaN is NaN."""
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or not size or not hasattr(mmap, "MAP_PRIVATE"):
        return like.new_zeros(shape)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # A huge page has thousands of slots.
        with suppress(OSError):
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=like.dtype).view(shape)
