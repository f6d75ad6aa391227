"""Slots for keys and values, one sequence of slots per row, and the masks of the fed tokens.

Shapes: B rows (sequences), n tokens fed per row, S slots in use, C slots in all, H heads,
D head size.

Row b's committed tokens are in slots 0 … len_b−1. To roll back, use a smaller length: the next
forward overwrites the rejected tokens. Tokens are fed at slots start_b … start_b+n−1, and `start`
may differ between rows. A ragged batch needs nothing else.

Memory is allocated for some rows, and the first of them are in use. A row that leaves makes room
for another one, without a new allocation.

Layers may be on different devices. A layer's keys and values are on the device of the layer.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from decode.base.device import reads_are_free, to_device
from decode.model.cache.real_tokens import RealTokens
from decode.model.cache.sliding_window import SlidingWindow
from decode.model.cache.slot_memory import SlotMemory, SlotStates

# The most passes over one token of each row whose hidden states wait to be written.
WAITING = 64


class _FedPass:
    """Where the current forward writes, and which slots its attention gets. All layers of one cache
    share it."""

    # The first slot if all rows start at the same slot. None: `slots_on` says where tokens go.
    begin: int | None = None
    end: int = 0  # one past the last slot any row uses, rounded up to a step
    fresh: bool = True  # all rows were empty before
    rows: slice = slice(0, 0)  # those that are fed
    # The slots that attention gets: of all these rows, or int64 [B, S], of each. `end` is the end.
    read: slice | Tensor = slice(0, 0)
    count: int = 0  # S, how many they are
    # The tokens that are fed, if they are fewer than rows times columns. Then the model's states
    # are those of this list, as of one row, [1, T, …]. None: [B, n, …].
    real: RealTokens | None = None

    def __init__(self) -> None:
        self.feed(np.zeros(0, dtype=np.int64), 0)

    def feed(self, starts: np.ndarray, n: int) -> None:
        """The rows feed n tokens each, or those of `real`. starts: int [B], the slots of the first
        ones."""
        # A copy: the caller may count these tokens before they are written.
        self.starts, self._n = np.array(starts, dtype=np.int64), n
        self._slots: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def taken(self, cache: Tensor) -> Tensor:
        """[B, H, S, D]: the slots that attention gets, of a layer's keys or values [R, H, C, D]."""
        if isinstance(self.read, slice):
            return cache[self.rows, :, self.read]
        slots, rows = self.read.to(cache.device), self.rows
        rows_B1 = torch.arange(rows.start, rows.stop, device=cache.device)[:, None]
        return cache[rows_B1, :, slots].transpose(1, 2)

    def slots_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The row of each fed token, [B, 1], and its slot, [B, n], on the device of a layer. Of a
        list of tokens: [1, T] each."""
        if device not in self._slots:
            if self.real is None:
                rows, columns = np.arange(len(self.starts))[:, None], np.arange(self._n)
                slots = self.starts[:, None] + columns
            else:
                rows, columns = self.real.rows[None], self.real.columns
                slots = self.starts[rows] + columns
            rows = rows + self.rows.start
            self._slots[device] = to_device(rows, device), to_device(slots, device)
        return self._slots[device]


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [R, H, C, D], written in place. rows: R, those in use.
    addresses: of both. strides: of each."""

    is_sliding = False

    def __init__(
        self, number: int, stores: tuple[SlotMemory, SlotMemory], capacity: int, fed: _FedPass
    ) -> None:
        super().__init__()
        self.number, self.stores, self.capacity, self.fed = number, stores, capacity, fed
        self.rows = 0

    @property
    def real(self) -> RealTokens | None:
        """The list of tokens that is fed. None: all tokens of the fed rows."""
        return self.fed.real

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        for store, states in zip(self.stores, (key_states, value_states), strict=True):
            store.make(self.number, states)
        self.is_initialized = True
        keys, values = (store.of(self.number)[: self.rows] for store in self.stores)
        self.use(keys, values)

    def use(self, keys: Tensor, values: Tensor) -> None:
        """Have these keys and values. Call it again after the stores change."""
        self.keys, self.values = keys, values
        self.addresses = self.keys.data_ptr(), self.values.data_ptr()
        self.strides = self.keys.stride()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values of the fed tokens, [B, H, n, D] or [1, H, T, D]. Returns those of
        the slots that attention gets, [B, H, S, D]."""
        self.write(key_states, value_states)
        return self.fed.taken(self.keys), self.fed.taken(self.values)

    def write(self, key_states: Tensor, value_states: Tensor) -> None:
        """As `update`, without the slots that attention gets."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        fed = self.fed
        for cache, new in ((self.keys, key_states), (self.values, value_states)):
            if not new.shape[3]:  # kept hidden states have no values
                continue
            if fed.begin is not None:
                cache[fed.rows, :, fed.begin : fed.begin + new.shape[2]] = new
            else:
                rows, slots = fed.slots_on(cache.device)
                cache[rows, :, slots] = new.transpose(1, 2)

    def get_seq_length(self) -> int:
        return self.fed.begin or 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.fed.count, 0

    def get_max_length(self) -> int:
        return self.capacity


class Slots:
    """`rows` empty sequences of at most `capacity` slots, in each of `layers` layers.

    step: after the prompt, attention gets a multiple of `step` slots. Slots past the text are
    masked. states: how many hidden states of each token are kept beside the layers
    (`keep_states`).
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        capacity: int,
        device: torch.device,
        *,
        step: int = 1,
        states: int = 0,
    ) -> None:
        self.device, self._step = device, step
        capacity = round_up_slots(capacity, step)
        self.rows = rows  # those in use
        self.allocated = rows, capacity  # rows, and slots of each
        # How many slots each allocated row has written. Copies need not touch the others.
        self._written = np.zeros(rows, dtype=np.int64)
        self._fed = _FedPass()
        # bool [2 C]: what a token sees of the slots is a part of it, C times True and then False.
        self._past = torch.zeros(0, dtype=torch.bool)
        self._stores = SlotMemory(layers, rows, capacity), SlotMemory(layers, rows, capacity)
        every = [
            SlotLayer(number, self._stores, capacity, self._fed)
            for number in range(layers + states)
        ]
        self.layers, self._states = every[:layers], every[layers:]
        self.states = states
        # Of passes over one token of each row: its slots, int [B], and hidden states, [B, 1, H].
        self._waiting: list[tuple[np.ndarray, Sequence[Tensor]]] = []
        self._look_up()

    def place(
        self,
        start: np.ndarray,
        n: int,
        sliding: SlidingWindow | None = None,
        root: np.ndarray | None = None,
        *,
        counts: np.ndarray | None = None,
        first: int = 0,
        reads: bool = True,
    ) -> None:
        """The next pass feeds n tokens of each of the B rows from `first` on. They go to the slots
        from `start`, int [B].

        counts: int [B], only the first ones of each row are fed, as a list (`RealTokens`). None:
        all. reads: of prompts, which get no mask at their start, and may get other bits so.
        sliding: attention gets only the slots that one of the fed tokens may see. None: all slots
        up to the last one. root: int [B], for the nodes of a tree, the slot of its first node."""
        fed = self._fed
        starts = start.tolist()
        least, last = min(starts), max(starts)
        fed.fresh = reads and not last
        fed.rows = slice(first, first + len(starts))
        fed.real = None
        if counts is not None and (counts < n).any():
            fed.real = RealTokens(counts, n, self.device)
        # The pass over a prompt is causal, so it needs no mask and no padding to `step`.
        ends = start + (n if fed.real is None else fed.real.counts)
        end = last + n if fed.real is None else int(ends.max())
        self.wrote(ends, first)
        fed.end = end if fed.fresh else round_up_slots(end, self._step)
        fed.read, fed.count = slice(0, fed.end), fed.end
        if sliding is not None:
            base = start if root is None else root
            capacity = self.allocated[1]
            read = sliding.slots(base, ends, fed.end, capacity, self._step)
            if isinstance(read, slice):
                fed.read, fed.count = read, read.stop - read.start
            else:
                fed.read, fed.count = to_device(read, self.device), read.shape[1]
        fed.feed(start, n)
        fed.begin = least if fed.real is None and least == last else None
        if fed.begin is None and self.device.type != "cpu":  # before the pass, which may be a graph
            fed.slots_on(self.device)

    @property
    def real(self) -> RealTokens | None:
        """The list of tokens that was placed last. None: all tokens of the fed rows."""
        return self._fed.real

    def wrote(self, ends: np.ndarray, first: int = 0) -> None:
        """The rows from `first` on may have written the slots below these, int [B]. What writes
        into the layers without `place` must call it."""
        written = self._written[first : first + len(ends)]
        np.maximum(written, ends, out=written)

    def keep_states(self, values: Sequence[Tensor], *, waits: bool = False) -> None:
        """Keep hidden states of the placed tokens, [B, n, H] or [1, T, H] each, in the slots of
        their keys. waits: those of plain steps are written together, before they are read."""
        if waits and values[0].shape[:2] == (self.rows, 1) and self._states[0].is_initialized:
            self._waiting.append((self._fed.starts, values))
            if len(self._waiting) == WAITING:
                self._write_states()
            return
        self._write_states()
        for layer, states in zip(self._states, values, strict=True):
            layer.write(states[:, None], states[:, None, :, :0])

    def _write_states(self) -> None:
        """Write the hidden states that wait."""
        if not self._waiting:
            return
        starts, values = zip(*self._waiting, strict=True)
        self._waiting = []
        where = np.arange(self.rows)[:, None], np.stack(starts, 1)
        for layer, states in zip(self._states, zip(*values, strict=True), strict=True):
            rows, slots = (to_device(x, layer.keys.device) for x in where)
            layer.keys[rows, 0, slots] = torch.cat(states, 1)

    @property
    def state_slots(self) -> Tensor:
        """[R, C, H]: the memory of the hidden states of all rows, the only ones that are kept,
        after the first `keep_states`."""
        self._write_states()
        return self._states[0].keys[:, 0]

    def kept_states(self, rows: slice, count: int) -> list[Tensor]:
        """A copy of the hidden states of the first `count` tokens of these rows, [B, count, H]."""
        self._write_states()
        return [layer.keys[rows, 0, :count].clone() for layer in self._states]

    def mask(
        self,
        base_B1: Tensor,
        n: int,
        ancestors_BNM: Tensor | None,
        sliding: SlidingWindow | None = None,
        depth_BN: Tensor | None = None,
    ) -> Tensor | None:
        """The slots that each placed token may see, bool [B, 1, n, S], or [1, 1, T, S] of a list.
        None if plain causal attention is enough.

        base_B1: the first slot of the tree; every token sees all slots below it. ancestors_BNM: for
        a tree of m nodes with the last n of them fed, the nodes that each fed node may see. None: a
        chain. sliding: None: a token sees all of the text. depth_BN: how many positions each fed
        token is after the first slot of the tree; None: as many as it has ancestors there.
        """
        inside_window = sliding is None or self._fed.end <= sliding.size
        alone = n == 1 and self._step == 1 and self._fed.begin is not None
        if ancestors_BNM is None and inside_window and (self._fed.fresh or alone):
            return None
        read, begin = self._fed.read, self._fed.begin
        slots = read  # [S] or [B, S]
        if isinstance(slots, slice):
            if n == 1 and begin is not None and ancestors_BNM is None and inside_window:
                first = self.allocated[1] - 1 - begin
                seen = self._past[first + slots.start : first + slots.stop]
                return seen.expand(base_B1.shape[0], 1, 1, -1)
            if inside_window and reads_are_free(self.device):
                trees = None if ancestors_BNM is None else ancestors_BNM.numpy()
                return self._mask_on_host(base_B1[:, 0] - slots.start, n, trees)
            slots = torch.arange(slots.start, slots.stop, device=self.device)
        rows, real = base_B1.shape[0], self._fed.real
        if ancestors_BNM is None:
            depth_BN = torch.arange(n, device=self.device)[None]
        else:
            depth_BN = ancestors_BNM.sum(2) - 1 if depth_BN is None else depth_BN
            ancestors_BNM = ancestors_BNM.expand(rows, -1, -1)
        if real is not None:  # each token of the list is a row of one token
            base_B1 = real.flat(base_B1.expand(-1, n)).T
            depth_BN = real.flat(depth_BN.expand(rows, -1)).T
            slots = slots if slots.ndim == 1 else real.flat(slots[:, None].expand(-1, n, -1))[0]
            if ancestors_BNM is not None:
                ancestors_BNM = real.flat(ancestors_BNM).transpose(0, 1)
        positions_BN1, past_B1S = (base_B1 + depth_BN)[:, :, None], None
        slots_B1S = slots[None, None] if slots.ndim == 1 else slots[:, None]
        if ancestors_BNM is None:
            seen = slots_B1S <= positions_BN1
        else:
            if sliding is not None and not inside_window:
                # An ancestor is as far away as there are ancestors from it on.
                distance = ancestors_BNM.flip(2).cumsum(2).flip(2)
                ancestors_BNM = ancestors_BNM & (distance <= sliding.size)
            # The slots of the tree follow those of the past, as far as there are some.
            _, fed, nodes = ancestors_BNM.shape
            past_B1S = slots_B1S < base_B1[:, :, None]
            columns = past_B1S.sum(2, keepdim=True) + torch.arange(nodes, device=self.device)
            seen = torch.constant_pad_nd(past_B1S, (0, nodes)).repeat(1, fed, 1)
            seen = seen.scatter_(2, columns.expand(-1, fed, -1), ancestors_BNM)[:, :, :-nodes]
        if sliding is not None and not inside_window:
            near = sliding.sees(positions_BN1, slots_B1S)
            if past_B1S is not None:  # the slots of the tree are limited already
                near = near | ~past_B1S
            seen = seen & near
        return seen[:, None] if real is None else seen.transpose(0, 1)[None]

    def _mask_on_host(self, base_B: Tensor, n: int, trees_BNM: np.ndarray | None) -> Tensor:
        """As `mask`, without a window on a CPU: few rows are copied, without the many operations
        that do all at once. base_B: counted from the first slot that attention gets. trees_BNM:
        bool, the ancestors; None: chains."""
        fed, (rows,) = self._fed, base_B.shape
        real, count = fed.real, fed.count
        bounds = range(0, (rows + 1) * n, n) if real is None else real.bounds.tolist()
        seen = np.zeros((bounds[-1], count), dtype=bool)
        for row, base in enumerate(base_B.tolist()):
            part = seen[bounds[row] : bounds[row + 1]]
            if trees_BNM is None:
                for end, token in enumerate(part, base + 1):
                    token[:end] = True
                continue
            part[:, :base] = True
            # Nodes that are not fed may be past the last slot.
            part = part[:, base : base + trees_BNM.shape[2]]
            part[:] = trees_BNM[row if len(trees_BNM) > 1 else 0, : len(part), : part.shape[1]]
        found = torch.from_numpy(seen)
        return found.view(rows, 1, n, -1) if real is None else found[None, None]

    def commit(self, start: np.ndarray, columns_BM: np.ndarray, counts: np.ndarray) -> None:
        """Keep a path of the last forward: column `columns_BM[b, m]`, int64 [B, M], moves to slot
        start_b + m, for the first counts[b] columns, int [B].

        Nothing moves if all columns are already in place, as in a chain.
        """
        columns_M = np.arange(columns_BM.shape[1])
        misplaced = (columns_BM != columns_M) & (columns_M < counts[:, None])
        if not misplaced.any():
            return
        rows, targets = misplaced.nonzero()
        sources = columns_BM[rows, targets]
        where = (rows, start[rows] + sources, start[rows] + targets)
        rows_T, source_T, target_T = (to_device(x, self.device) for x in where)
        for store in self._stores:
            store.move(rows_T, source_T, target_T)

    def keep_rows(self, rows: np.ndarray) -> None:
        """Keep only these rows, int [B'] on the host, in this order. A row that is named again is
        copied. Memory stays allocated."""
        self._write_states()
        for store in self._stores:
            store.keep_rows(rows, self._written)
        self.rows = len(rows)
        self._written[: self.rows] = self._written[rows]
        self._look_up()

    def add_rows(self, count: int, capacity: int, *, least: bool = False) -> None:
        """Append empty rows. capacity: the slots that any row needs from now on. least: allocate
        what `least` says, else what `grown` says."""
        self._write_states()
        first = self.rows
        self.rows = first + count
        self.allocated = (self.least if least else self.grown)(self.rows, capacity)
        for store in self._stores:
            store.reserve(*self.allocated, first, self._written)
            self._look_up()  # frees the old memory before more is taken
        self._written = np.pad(self._written[:first], (0, self.allocated[0] - first))

    def grown(self, rows: int, capacity: int) -> tuple[int, int]:
        """How many rows and slots are allocated if these are needed. A step of growth is at least
        a half, because each one copies everything."""
        allocated, slots = self.allocated
        if rows > allocated:
            allocated = max(rows, allocated * 3 // 2)
        if capacity > slots:
            slots = round_up_slots(max(capacity, slots * 3 // 2), self._step)
        return allocated, slots

    def least(self, rows: int, capacity: int) -> tuple[int, int]:
        """As `grown`, but only the rows in use are allocated, and only the slots that one needs or
        has."""
        return rows, max(round_up_slots(capacity, self._step), self.allocated[1])

    @property
    def token_bytes(self) -> int:
        """The bytes of keys and values of one token of one row. 0 before the first forward."""
        return sum(store.token_bytes for store in self._stores)

    def take(self, row: int, count: int) -> SlotStates:
        """A copy of the first `count` slots of a row."""
        self._write_states()
        keys, values = (store.take(row, count) for store in self._stores)
        return SlotStates(keys, values, count)

    def put(self, row: int, states: SlotStates) -> None:
        """Write the first slots of a row."""
        self._written[row] = max(int(self._written[row]), states.count)
        for store, new in zip(self._stores, (states.keys, states.values), strict=True):
            store.put(row, new, states.count)
        for layer in (*self.layers, *self._states):
            # A layer that reads the keys of another one has none.
            layer.is_initialized = self._stores[0].has(layer.number)
        self._look_up()

    def copy_from(self, other: "Slots", source_BN: np.ndarray, target_BN: np.ndarray) -> None:
        """Copy slots of other slots with the same rows and layers: of row b, slot source_BN[b, i]
        goes to slot target_BN[b, i] here, int [B, N] each. All layers have been written before.
        Hidden states are not copied."""
        self.wrote(target_BN.max(1, initial=-1) + 1)
        rows_B1 = torch.arange(len(source_BN), device=self.device)[:, None]
        source, target = (to_device(x, self.device) for x in (source_BN, target_BN))
        for store, from_ in zip(self._stores, other._stores, strict=True):
            copied = from_.copy(rows_B1, source)
            store.write(rows_B1, target, copied[: len(copied) - from_.states])

    @contextmanager
    def restored(self, start: np.ndarray, n: int) -> Iterator[None]:
        """After this context, the n slots of each row from `start` on, int [B], are as before it.

        Stale slots are masked, but a NaN in one of them would still spoil the row: 0·NaN is NaN.
        """
        rows_B1 = torch.arange(len(start), device=self.device)[:, None]
        slots_BN = to_device(start, self.device)[:, None] + torch.arange(n, device=self.device)
        slots_BN = slots_BN.clamp(max=self.allocated[1] - 1)
        copies = [store.copy(rows_B1, slots_BN) for store in self._stores]
        try:
            yield
        finally:
            for store, copied in zip(self._stores, copies, strict=True):
                store.write(rows_B1, slots_BN, copied)

    def _look_up(self) -> None:
        capacity = self.allocated[1]
        if len(self._past) != 2 * capacity:
            self._past = torch.arange(2 * capacity, device=self.device) < capacity
        keys, values = (store.first_rows(self.rows) for store in self._stores)
        for layer in (*self.layers, *self._states):
            layer.rows, layer.capacity = self.rows, capacity
            if layer.is_initialized:
                layer.use(keys[layer.number], values[layer.number])


def round_up_slots(count: int, step: int) -> int:
    """The smallest multiple of `step` that holds `count` slots."""
    return -(-count // step) * step
