"""Slots for keys and values, one sequence of slots per row, and the masks of the fed tokens.

Shapes: B rows (sequences), n tokens fed per row, S slots in use, C slots in all, H heads,
D head size.

Row b's committed tokens are in slots 0 … len_b−1. To roll back, use a smaller length: the next
forward overwrites the rejected tokens. Tokens are fed at slots start_b … start_b+n−1, and `start`
may differ between rows. A ragged batch needs nothing else.

Layers may be on different devices. A layer's keys and values are on the device of the layer.
"""

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from decode.device import to_device


class _Window:
    """Where the current forward writes. All layers of one cache share it."""

    begin: int | None = None  # the first slot if all rows start at the same slot, else None
    end: int = 0  # one past the last slot any row uses

    def scatter(self, rows: Tensor, slots: Tensor) -> None:
        """For rows with different first slots. rows: [B, 1]; slots: [B, n], each token's slot."""
        self._slots = {rows.device: (rows, slots)}

    def slots_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The arguments of `scatter`, on the device of a layer."""
        if device not in self._slots:
            rows, slots = next(iter(self._slots.values()))
            self._slots[device] = rows.to(device), slots.to(device)
        return self._slots[device]


class _Store:
    """The keys of all layers, or the values, [B, H, C, D] per layer. They are in one tensor, so one
    gather moves a path in all layers. A layer with a different shape, dtype or device than the
    first one has a separate tensor."""

    def __init__(self, layers: int, rows: int, capacity: int) -> None:
        self._layers, self._rows, self._capacity = layers, rows, capacity
        self._tensors: list[Tensor] = []  # [n, B, H, C, D]
        self._index: dict[int, tuple[int, int]] = {}  # layer: (tensor, index in it)

    def make(self, layer: int, like: Tensor) -> None:
        """Allocate memory for a layer. like: its keys or values of the fed tokens, [B, H, n, D]."""
        shape = (self._rows, like.shape[1], self._capacity, like.shape[3])
        # Zeros, not empty: a masked slot is multiplied by a weight of 0, and 0·NaN is NaN.
        if not self._tensors:
            self._tensors.append(like.new_zeros(self._layers, *shape))
        first = self._tensors[0]
        alike = first.shape[1:] == shape and first.dtype == like.dtype
        if alike and first.device == like.device:
            self._index[layer] = 0, layer
        else:
            self._index[layer] = len(self._tensors), 0
            self._tensors.append(like.new_zeros(1, *shape))

    def of(self, layer: int) -> Tensor:
        """The keys or values of a layer, [B, H, C, D]."""
        tensor, index = self._index[layer]
        return self._tensors[tensor][index]

    def move(self, rows_B1: Tensor, source_BM: Tensor, target_BM: Tensor) -> None:
        for x in self._tensors:
            rows, source, target = (y.to(x.device) for y in (rows_B1, source_BM, target_BM))
            x[:, rows, :, target] = x[:, rows, :, source]

    def keep_rows(self, rows: Tensor) -> None:
        """Move the rows that stay to the front of the existing memory. This copies one layer at a
        time: a copy of all layers would be a second cache in memory."""
        self._rows = len(rows)
        for x in self._tensors:
            indices = rows.to(x.device)
            for layer in range(len(x)):
                x[layer, : self._rows] = x[layer].index_select(0, indices)
        self._tensors = [x[:, : self._rows] for x in self._tensors]


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [B, H, C, D], written in place."""

    is_sliding = False

    def __init__(
        self, number: int, stores: tuple[_Store, _Store], capacity: int, window: _Window
    ) -> None:
        super().__init__()
        self.number, self.stores, self.capacity, self.window = number, stores, capacity, window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        for store, states in zip(self.stores, (key_states, value_states), strict=True):
            store.make(self.number, states)
        self.is_initialized = True
        self.look_up()

    def look_up(self) -> None:
        """Get keys and values from the stores. Call it again after the stores change their rows."""
        if self.is_initialized:
            self.keys, self.values = (store.of(self.number) for store in self.stores)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values of the fed tokens, [B, H, n, D]. Returns those of all slots in use,
        [B, H, S, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self.window
        for cache, new in ((self.keys, key_states), (self.values, value_states)):
            if window.begin is not None:
                cache[:, :, window.begin : window.begin + new.shape[2]] = new
            else:
                rows, slots = window.slots_on(cache.device)
                cache[rows, :, slots] = new.transpose(1, 2)
        return self.keys[:, :, : window.end], self.values[:, :, : window.end]

    def get_seq_length(self) -> int:
        return self.window.begin or 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.end, 0

    def get_max_length(self) -> int:
        return self.capacity


class Slots:
    """`rows` empty sequences of at most `capacity` slots, in each of `layers` layers.

    step: after the prompt, attention gets a multiple of `step` slots. Slots past the text are
    masked.
    """

    def __init__(
        self, layers: int, rows: int, capacity: int, device: torch.device, *, step: int = 1
    ) -> None:
        self.device, self._step = device, step
        capacity = round_up_slots(capacity, step)
        self._window = _Window()
        self._stores = _Store(layers, rows, capacity), _Store(layers, rows, capacity)
        self.layers = [
            SlotLayer(number, self._stores, capacity, self._window) for number in range(layers)
        ]

    def place(self, start: np.ndarray, n: int) -> None:
        """The next n fed tokens go to the slots from `start`, int [B]."""
        window = self._window
        # The pass over a prompt is causal, so it needs no mask and no padding to `step`.
        end = int(start.max()) + n
        window.end = round_up_slots(end, self._step) if start.any() else end
        window.begin = int(start[0]) if bool((start == start[0]).all()) else None
        if window.begin is None:
            first = to_device(start, self.device)[:, None]
            rows = torch.arange(len(start), device=self.device)[:, None]
            window.scatter(rows, first + torch.arange(n, device=self.device))

    def mask(
        self,
        base_B1: Tensor,
        start: np.ndarray,
        n: int,
        ancestors_BNM: Tensor | None,
        window: int | None = None,
    ) -> Tensor | None:
        """The slots that each placed token may see, bool [B, 1, n, S]. None if plain causal
        attention is enough.

        base_B1: the first slot of the tree; every token sees all slots below it. ancestors_BNM: for
        a tree of m nodes with the last n of them fed, the nodes that each fed node may see. None: a
        chain. window: how many tokens a token sees, itself included. None: all tokens.
        """
        inside_window = window is None or self._window.end <= window
        causal = not start.any() or (n == 1 and self._step == 1)
        causal = causal and inside_window and self._window.begin is not None
        if ancestors_BNM is None and causal:
            return None
        slots_S = torch.arange(self._window.end, device=self.device)
        offset_BS = slots_S - base_B1  # a slot's column in the tree; negative: the past
        if ancestors_BNM is None:
            depth_BN = torch.arange(n, device=self.device)[None]
            seen = offset_BS[:, None, :] <= depth_BN[:, :, None]
        else:
            depth_BN = ancestors_BNM.sum(2) - 1
            if window is not None and not inside_window:
                # An ancestor is as far away as there are ancestors from it on.
                distance = ancestors_BNM.flip(2).cumsum(2).flip(2)
                ancestors_BNM = ancestors_BNM & (distance <= window)
            nodes = ancestors_BNM.shape[2]
            inside_BS = (offset_BS >= 0) & (offset_BS < nodes)
            column_B1S = offset_BS.clamp(0, nodes - 1)[:, None, :].expand(-1, n, -1)
            visible = ancestors_BNM.expand(len(start), -1, -1).gather(2, column_B1S)
            seen = (offset_BS < 0)[:, None, :] | (visible & inside_BS[:, None, :])
        if window is not None and not inside_window:
            near = offset_BS[:, None, :] > depth_BN[:, :, None] - window
            if ancestors_BNM is not None:  # the slots of the tree are limited already
                near = near | (offset_BS >= 0)[:, None, :]
            seen = seen & near
        return seen[:, None]

    def commit(self, start: np.ndarray, columns_BM: Tensor, counts: np.ndarray) -> None:
        """Keep a path of the last forward: column `columns_BM[b, m]` moves to slot start_b + m, for
        the first counts[b] columns, int [B]. columns_BM: int64 on the host; elsewhere it is read.

        Nothing moves if all columns are already in place, as in a chain.
        """
        columns_M = np.arange(columns_BM.shape[1])
        on_host = columns_BM.cpu().numpy()
        misplaced = (on_host != columns_M) & (columns_M < counts[:, None])
        if not misplaced.any():
            return
        columns_BM = columns_BM[:, : int(np.flatnonzero(misplaced.any(0))[-1]) + 1]
        first_B1 = to_device(start, self.device)[:, None]
        rows_B1 = torch.arange(len(start), device=self.device)[:, None]
        source_BM = first_B1 + to_device(columns_BM, self.device)
        target_BM = first_B1 + torch.arange(columns_BM.shape[1], device=self.device)
        for store in self._stores:
            store.move(rows_B1, source_BM, target_BM)

    def keep_rows(self, rows: Tensor) -> None:
        """Keep only these rows (int64 [B']), in this order."""
        for store in self._stores:
            store.keep_rows(rows)
        for layer in self.layers:
            layer.look_up()


def round_up_slots(count: int, step: int) -> int:
    """The smallest multiple of `step` that holds `count` slots."""
    return -(-count // step) * step
