"""Slots for keys and values, one run of them per row, and what each fed token sees of them.

Shapes: B rows (sequences), n tokens fed per row, S slots in use, C slots in all, H heads,
D head size.

Row b's committed tokens sit in slots 0 … len_b−1, so rolling back is nothing but using a smaller
length: the next forward writes over what was rejected. Tokens are fed at slots
start_b … start_b+n−1, and `start` may differ from row to row; that is all a ragged batch needs.

Layers may be on different devices; a layer's keys and values are on its own.
"""

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class _Window:
    """Where the forward that is under way writes; shared by all layers of one cache."""

    begin: int | None = None  # the first slot where all rows start alike, else None
    end: int = 0  # one past the last slot any row uses

    def scatter(self, rows: Tensor, slots: Tensor) -> None:
        """Rows start at different slots: [B, 1] and [B, n], the index of each token's slot."""
        self._places = {rows.device: (rows, slots)}

    def places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """What `scatter` was given, on the device of a layer."""
        if device not in self._places:
            rows, slots = next(iter(self._places.values()))
            self._places[device] = rows.to(device), slots.to(device)
        return self._places[device]


class _Store:
    """What all layers keep of one kind, keys or values, [B, H, C, D] each: in one tensor, so that
    one gather moves a path in all of them. Layers unlike the first have tensors of their own."""

    def __init__(self, layers: int, rows: int, capacity: int) -> None:
        self._layers, self._rows, self._capacity = layers, rows, capacity
        self._tensors: list[Tensor] = []  # [n, B, H, C, D]
        self._places: dict[int, tuple[int, int]] = {}  # a layer's: which tensor, and where in it

    def make(self, layer: int, like: Tensor) -> None:
        """Room for a layer whose fed tokens are [B, H, n, D]."""
        shape = (self._rows, like.shape[1], self._capacity, like.shape[3])
        # Zeros, not empty: a masked slot is still multiplied by its weight of 0, and 0·NaN is NaN.
        if not self._tensors:
            self._tensors.append(like.new_zeros(self._layers, *shape))
        first = self._tensors[0]
        alike = first.shape[1:] == shape and first.dtype == like.dtype
        if alike and first.device == like.device:
            self._places[layer] = 0, layer
        else:
            self._places[layer] = len(self._tensors), 0
            self._tensors.append(like.new_zeros(1, *shape))

    def of(self, layer: int) -> Tensor:
        """[B, H, C, D]."""
        tensor, place = self._places[layer]
        return self._tensors[tensor][place]

    def move(self, rows_B1: Tensor, source_BM: Tensor, target_BM: Tensor) -> None:
        for x in self._tensors:
            rows, source, target = (y.to(x.device) for y in (rows_B1, source_BM, target_BM))
            x[:, rows, :, target] = x[:, rows, :, source]

    def keep_rows(self, rows: Tensor) -> None:
        """The rows that stay move to the front of the memory that is there. One layer at a time is
        copied: a copy of all of them would be a second cache beside the first."""
        self._rows = len(rows)
        for x in self._tensors:
            kept = rows.to(x.device)
            for layer in range(len(x)):
                x[layer, : self._rows] = x[layer].index_select(0, kept)
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
        """Take what the stores have; again after they changed their rows."""
        if self.is_initialized:
            self.keys, self.values = (store.of(self.number) for store in self.stores)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write those of the fed tokens, [B, H, n, D]; all that are in use, [B, H, S, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self.window
        for cache, new in ((self.keys, key_states), (self.values, value_states)):
            if window.begin is not None:
                cache[:, :, window.begin : window.begin + new.shape[2]] = new
            else:
                rows, slots = window.places(cache.device)
                cache[rows, :, slots] = new.transpose(1, 2)
        return self.keys[:, :, : window.end], self.values[:, :, : window.end]

    def get_seq_length(self) -> int:
        return self.window.begin or 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.end, 0

    def get_max_length(self) -> int:
        return self.capacity


class Slots:
    """`rows` empty sequences of at most `capacity` slots in each of so many layers.

    step: after the prompt, attention is given a multiple of so many slots; those past the text are
    masked.
    """

    def __init__(
        self, layers: int, rows: int, capacity: int, device: torch.device, *, step: int = 1
    ) -> None:
        self.device, self._step = device, step
        capacity = _round_up(capacity, step)
        self._window = _Window()
        self._stores = _Store(layers, rows, capacity), _Store(layers, rows, capacity)
        self.layers = [
            SlotLayer(number, self._stores, capacity, self._window) for number in range(layers)
        ]

    def place(self, start: np.ndarray, n: int) -> None:
        """The n tokens that are fed next go to the slots from `start`, int [B], on."""
        window = self._window
        # A prompt's pass is causal as it stands, and needs no mask.
        end = int(start.max()) + n
        window.end = _round_up(end, self._step) if start.any() else end
        window.begin = int(start[0]) if bool((start == start[0]).all()) else None
        if window.begin is None:
            first = torch.as_tensor(start, device=self.device)[:, None]
            rows = torch.arange(len(start), device=self.device)[:, None]
            window.scatter(rows, first + torch.arange(n, device=self.device))

    def mask(
        self, base_B1: Tensor, start: np.ndarray, n: int, ancestors_BNM: Tensor | None
    ) -> Tensor | None:
        """What each of the placed tokens may see, bool [B, 1, n, S]; None where plain causal
        attention says it.

        base_B1: where the tree begins; everything below it is seen. ancestors_BNM: which of its m
        nodes, whose last n are fed, each of those may see; None: a chain.
        """
        causal = not start.any() or (n == 1 and self._step == 1)
        if ancestors_BNM is None and causal and self._window.begin is not None:
            return None
        slots_S = torch.arange(self._window.end, device=self.device)
        offset_BS = slots_S - base_B1  # a slot's column in the tree; negative: the past
        if ancestors_BNM is None:
            seen = offset_BS[:, None, :] <= torch.arange(n, device=self.device)[None, :, None]
        else:
            nodes = ancestors_BNM.shape[2]
            inside_BS = (offset_BS >= 0) & (offset_BS < nodes)
            column_B1S = offset_BS.clamp(0, nodes - 1)[:, None, :].expand(-1, n, -1)
            own = ancestors_BNM.expand(len(start), -1, -1).gather(2, column_B1S)
            seen = (offset_BS < 0)[:, None, :] | (own & inside_BS[:, None, :])
        return seen[:, None]

    def commit(self, start: np.ndarray, columns_BM: Tensor, counts: np.ndarray) -> None:
        """Keep a path of the last forward: column `columns_BM[b, m]` moves to slot start_b + m, for
        the first counts[b] columns, int [B].

        Nothing is moved where all lie where they belong, as a chain's do.
        """
        places_M = np.arange(columns_BM.shape[1])
        moved = (columns_BM.cpu().numpy() != places_M) & (places_M < counts[:, None])
        if not moved.any():
            return
        columns_BM = columns_BM[:, : int(np.flatnonzero(moved.any(0))[-1]) + 1]
        first_B1 = torch.as_tensor(start, device=self.device)[:, None]
        rows_B1 = torch.arange(len(start), device=self.device)[:, None]
        source_BM = first_B1 + columns_BM
        target_BM = first_B1 + torch.arange(columns_BM.shape[1], device=self.device)
        for store in self._stores:
            store.move(rows_B1, source_BM, target_BM)

    def keep_rows(self, rows: Tensor) -> None:
        """Drop all rows but these (int64 [B']), in this order."""
        for store in self._stores:
            store.keep_rows(rows)
        for layer in self.layers:
            layer.look_up()


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step
