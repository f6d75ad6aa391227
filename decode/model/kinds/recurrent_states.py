"""The states of layers with linear attention or a short convolution, one of each layer per row.

Such a layer has no key and value per token. It has a state that every token changes: the gated
delta rule of Qwen3-Next and Qwen3.5 (2412.06464), or the last inputs of a convolution (LFM2). A
state cannot go back. So every row has a snapshot of its states, and the inputs that these layers
got since then. A row goes back in two steps: its snapshot is restored, and these layers alone read
the inputs of the tokens that stay. Other layers compute nothing, because these inputs are the same
as in the pass.

Rows are replayed in groups that read the same number of tokens. So padding never enters a state.

A token tree is read by these layers alone as its paths down to the leaves, each a row with the
states of its text. The states stay those before the tree, and the path that is committed is in the
log as if it had been a chain.

Shapes: B rows, n tokens fed per row, H hidden size, T tokens in the log, P paths of depth D.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from decode.base.device import to_device
from decode.base.errors import UserError
from decode.model.cache_names import cache_argument, with_cache
from decode.model.hidden_states import layer_list_name
from decode.model.pretrained import decoder_config, input_device
from decode.tree_structure import leaf_paths

# Where a cache layer of transformers has its states, by their numbers.
STATES = ("conv_states", "recurrent_states")
# A row with more tokens than that after its snapshot gets a new snapshot.
LONGEST_LOG = 64
UNKNOWN = -1


class RecurrentStates:
    """The states of the layers `numbers` of a model, for the rows that are decoding.

    The calls for one pass: `lost` and `rewind`, then the pass inside `feeding`.

    model: the model that computes the passes. Raises UserError if the part of a layer that has the
    state cannot be told from the others, or if the cache has states in another form.
    """

    def __init__(self, model: PreTrainedModel, numbers: Sequence[int]) -> None:
        self.model, self.device = model, input_device(model)
        self._mixers = {number: _mixer(model, number) for number in numbers}
        self.reset(0, 0)
        for number, layer in self.layers.items():
            if not all(isinstance(getattr(layer, kind, None), dict) for kind in STATES):
                raise _unknown(model, number)

    def reset(self, rows: int, capacity: int) -> None:
        """Start `rows` empty rows of at most `capacity` tokens."""
        self.cache = DynamicCache(config=self.model.config)
        self.layers: dict[int, Any] = {number: self.cache.layers[number] for number in self._mixers}
        # Of each layer: its states now, and in the snapshots, [B, …]. Empty before the first pass.
        self._now: dict[int, list[Tensor]] = {}
        self._snapshots: dict[int, list[Tensor]] = {}
        # int [B]: the tokens that are in the states now, or UNKNOWN; those in the snapshots; and
        # how many tokens after the snapshot are in the log.
        self._at, self._base, self._logged = np.zeros((3, rows), dtype=np.int64)
        # Of each layer: its inputs, [T, H] per pass; and int64 [B, m]: where a row's tokens are.
        self._log: dict[int, list[Tensor]] = {number: [] for number in self._mixers}
        self._places = np.zeros((rows, 0), dtype=np.int64)
        self._tokens = torch.zeros(rows, capacity, dtype=torch.int64, device=self.device)

    def among(self, slots: Sequence[Any]) -> list[Any]:
        """The cache layers of the complete model: `slots` are those of its other layers."""
        others = iter(slots)
        count = len(slots) + len(self.layers)
        return [self.layers[n] if n in self.layers else next(others) for n in range(count)]

    def add_rows(self, count: int, capacity: int) -> None:
        """Append empty rows. capacity: the tokens that any row may have from now on."""
        grown = (0, max(capacity - self._tokens.shape[1], 0), 0, count)
        self._tokens = nn.functional.pad(self._tokens, grown)
        self._at, self._base, self._logged = (
            np.pad(x, (0, count)) for x in (self._at, self._base, self._logged)
        )
        self._places = np.pad(self._places, ((0, count), (0, 0)))
        for states in (self._now, self._snapshots):
            for number, kept in states.items():
                states[number] = [torch.cat([x, x.new_zeros(count, *x.shape[1:])]) for x in kept]

    def keep_rows(self, rows: np.ndarray) -> None:
        """Keep only these rows, int [B'], in this order."""
        at = to_device(rows, self.device)
        self._tokens = self._tokens[at]
        self._at, self._base = self._at[rows], self._base[rows]
        self._logged, self._places = self._logged[rows], self._places[rows]
        for states in (self._now, self._snapshots):
            for number, kept in states.items():
                states[number] = [x.index_select(0, at.to(x.device)) for x in kept]

    def lost(self, start: np.ndarray, first: int = 0) -> np.ndarray:
        """Which of the B rows from `first` on have states after their first `start` tokens, int
        [B], that are neither kept nor can be replayed. Feed these rows their tokens again, from the
        first one on."""
        rows = slice(first, first + len(start))
        at, base = self._at[rows], self._base[rows]
        end = base + self._logged[rows]
        inside = (base <= start) & (start <= end)
        # Past all tokens of a row is nothing to know: its input has no meaning.
        past = start > np.maximum(at, end)
        return np.flatnonzero((start > 0) & (start != at) & ~inside & ~past)

    def tokens(self, row: int, count: int) -> Tensor:
        """int64 [1, count]: a copy of the first tokens of a row."""
        return self._tokens[row : row + 1, :count].clone()

    def rewind(self, start: np.ndarray, first: int = 0, *, settle: bool = False) -> None:
        """Set the states of the B rows from `first` on to those after their first `start` tokens,
        int [B].

        settle: no row goes back further than that any more, so all get a new snapshot.
        """
        rows = np.arange(first, first + len(start))
        empty = rows[(start == 0) & (self._at[rows] != 0)]
        if len(empty):
            self._clear(empty)
        count = start - self._base[rows]
        back = (self._at[rows] != start) & (count >= 0) & (count <= self._logged[rows])
        for tokens in np.unique(count[back]).tolist():
            self._replay(rows[back & (count == tokens)], tokens)
        self._at[rows[back]], self._logged[rows[back]] = start[back], 0
        # The nodes of a tree that was not committed.
        self._logged[rows] = np.minimum(self._logged[rows], np.maximum(count, 0))
        # A row that went back has another text from here on.
        gapless = self._base[rows] + self._logged[rows] == start
        due = back | settle | ~gapless | (self._logged[rows] > LONGEST_LOG)
        due &= (self._at[rows] == start) & (self._base[rows] != start)
        self._take_snapshots(rows[due], start[due])

    def _clear(self, rows: np.ndarray) -> None:
        for states in (self._now, self._snapshots):
            for x in (x for kept in states.values() for x in kept):
                x[to_device(rows, x.device)] = 0
        self._at[rows] = self._base[rows] = self._logged[rows] = 0

    def _take_snapshots(self, rows: np.ndarray, at: np.ndarray) -> None:
        """at: int, the tokens in the states of these rows."""
        if not len(rows):
            return
        for number, kept in self._now.items():
            if len(rows) == len(self._at):
                self._snapshots[number] = [x.clone() for x in kept]
                continue
            for x, snapshot in zip(kept, self._snapshots[number], strict=True):
                index = to_device(rows, x.device)
                snapshot[index] = x[index]
        self._base[rows], self._logged[rows] = at, 0
        if not self._logged.any():
            self._log = {number: [] for number in self._mixers}

    def _replay(self, rows: np.ndarray, tokens: int) -> None:
        """Set the states of these rows to their snapshots and `tokens` of the log."""
        for number, layer in self.layers.items():
            states = [x.index_select(0, to_device(rows, x.device)) for x in self._snapshots[number]]
            if tokens:
                log = torch.cat(self._log[number])
                self._log[number] = [log]
                inputs = log[to_device(self._places[rows, :tokens], log.device)]
                _set_states(layer, states)
                mixer = self._mixers[number]
                mixer(hidden_states=inputs, **with_cache(mixer, self.cache))
                states = _states(layer)
            for x, new in zip(self._now[number], states, strict=True):
                x[to_device(rows, x.device)] = new

    @contextmanager
    def feeding(
        self,
        ids_BN: Tensor,
        start: np.ndarray,
        ends: np.ndarray | None,
        ancestors_BNM: Tensor | None = None,
        first: int = 0,
    ) -> Iterator[None]:
        """The pass that feeds these tokens to the slots from `start` on, int [B], of the rows from
        `first` on runs inside this context. ends: see `CachedLM.forward`, as is ancestors_BNM: a
        tree, of which other nodes may have been fed before."""
        rows, n = np.arange(first, first + len(start)), ids_BN.shape[1]
        fed = slice(first, first + len(start))
        self._set(fed)
        tree = ancestors_BNM is not None
        root = start - (ancestors_BNM.shape[2] - n) if ancestors_BNM is not None else start
        logs = tree or ends is None or bool((ends != start + n).any())
        inputs: dict[int, Tensor] = {}
        known = self._at[rows] == root
        self._at[rows] = UNKNOWN  # also if the pass fails
        # Hooks that stay would affect other users of the model.
        with ExitStack() as hooks:
            for number, mixer in self._mixers.items():
                if logs:
                    store = partial(_store, inputs, number)
                    hooks.enter_context(mixer.register_forward_pre_hook(store, with_kwargs=True))
            if ancestors_BNM is not None:
                counts = np.full(len(rows), n) if ends is None else ends - start
                nodes, places = leaf_paths(ancestors_BNM.cpu().numpy(), counts)
                logged = np.where(known, root - self._base[rows], 0)[:, None]
                earlier = logged + np.arange(ancestors_BNM.shape[2] - n)
                before = self._places[rows[:, None], earlier] * known[:, None]
                self._branch(hooks, inputs, before, nodes, places, fed)
            yield
        if not self._now:
            self._allocate(fed)
        columns = to_device(start, self.device)[:, None] + torch.arange(n, device=self.device)
        self._tokens[to_device(rows, self.device)[:, None], columns] = ids_BN
        self._at[rows[known]] = root[known] if tree else start[known] + n
        if logs:
            self._append(inputs, rows, known, n)
        if ends is not None and not tree:
            self.rewind(ends, first, settle=True)

    def _set(self, fed: slice) -> None:
        """Let the layers have the states of these rows."""
        for number, states in self._now.items():
            _set_states(self.layers[number], [x[fed] for x in states])

    def _branch(
        self,
        hooks: ExitStack,
        inputs: Mapping[int, Tensor],
        before_BM: np.ndarray,
        nodes_BPD: np.ndarray,
        places_BN: np.ndarray,
        fed: slice,
    ) -> None:
        """Let the layers read the paths of a tree (`leaf_paths`) as rows, token by token: their
        forms for several tokens fill up each row to a chunk. before_BM: where the log has the
        inputs of the nodes that were fed in other passes."""
        rows, paths, _ = nodes_BPD.shape
        before, nodes, places = (
            to_device(x, self.device) for x in (before_BM, nodes_BPD.reshape(rows, -1), places_BN)
        )
        later: list[Tensor] = []  # of the layer that runs, the tokens after the first

        def apart(number: int, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            layer, x = self.layers[number], inputs[number]
            if before.shape[1]:
                x = torch.cat([torch.cat(self._log[number])[before.to(x.device)], x], 1)
            x = _picked(x, nodes).unflatten(1, (paths, -1)).flatten(0, 1)
            _set_states(layer, [state.repeat_interleave(paths, 0) for state in _states(layer)])
            first, *later[:] = x.split(1, 1)
            return _reading(first, args, kwargs)

        def together(
            number: int, mixer: Any, args: Any, kwargs: dict[str, Any], output: Tensor
        ) -> Tensor:
            read = [_reading(x, args, kwargs) for x in later]
            outputs = [output, *(mixer.forward(*given, **named) for given, named in read)]
            _set_states(self.layers[number], [x[fed] for x in self._now[number]])
            by_place = torch.cat(outputs, 1).unflatten(0, (rows, paths)).flatten(1, 2)
            return _picked(by_place, places)

        for number, mixer in self._mixers.items():
            split, join = partial(apart, number), partial(together, number)
            hooks.enter_context(mixer.register_forward_pre_hook(split, with_kwargs=True))
            hooks.enter_context(mixer.register_forward_hook(join, with_kwargs=True))

    def commit(self, start: np.ndarray, columns_BM: np.ndarray, counts: np.ndarray) -> None:
        """Keep a path of the tree that was fed last, as `Slots.commit` does."""
        kept = np.flatnonzero(self._at[: len(start)] == start)
        rows, start, columns = kept[:, None], start[kept, None], columns_BM[kept]
        order, first = np.arange(columns.shape[1]), start - self._base[rows]
        self._places[rows, first + order] = self._places[rows, first + columns]
        self._logged[rows] = first + counts[kept, None]
        at, to, source = (to_device(x, self.device) for x in (rows, start + order, start + columns))
        self._tokens[at, to] = self._tokens[at, source]

    def _append(
        self, inputs: dict[int, Tensor], rows: np.ndarray, known: np.ndarray, n: int
    ) -> None:
        """Put inputs [B, n, H] of each layer into the log, for the rows whose states are known."""
        logs = next(iter(self._log.values()))
        places = sum(map(len, logs)) + np.arange(len(rows) * n).reshape(-1, n)
        for number, x in inputs.items():
            self._log[number].append(x.flatten(0, 1))
        missing = int(self._logged[rows].max()) + n - self._places.shape[1]
        self._places = np.pad(self._places, ((0, 0), (0, max(missing, 0))))
        kept = rows[known]
        columns = self._logged[kept][:, None] + np.arange(n)
        self._places[kept[:, None], columns] = places[known]
        self._logged[kept] += n

    def _allocate(self, fed: slice) -> None:
        """After the first pass: states for all rows, of the shapes that the layers made."""
        for number, layer in self.layers.items():
            made = _states(layer)
            self._now[number] = [x.new_zeros(len(self._at), *x.shape[1:]) for x in made]
            self._snapshots[number] = [torch.zeros_like(x) for x in self._now[number]]
            for x, new in zip(self._now[number], made, strict=True):
                x[fed] = new


def _mixer(model: PreTrainedModel, number: int) -> nn.Module:
    """The part of a layer that reads and writes its state."""
    name = layer_list_name(model)
    layers: Any = model.get_submodule(name) if name else None
    parts = list(layers[number].children()) if name else []
    mixers = [part for part in parts if cache_argument(part)]
    if len(mixers) != 1:
        raise _unknown(model, number)
    return mixers[0]


def _unknown(model: PreTrainedModel, number: int) -> UserError:
    kind = decoder_config(model).layer_types[number]
    return UserError(
        f"{type(model).__name__} keeps a running state (layer {number}, {kind}) in a form that is "
        f"not known with transformers {transformers.__version__}, so it cannot be rolled back "
        "after a rejected draft; use a model with attention layers, or one such as Qwen3-Next"
    )


def _store(
    inputs: dict[int, Tensor], number: int, _: nn.Module, args: Any, kwargs: dict[str, Any]
) -> None:
    inputs[number] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


def _reading(
    x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer, with these inputs."""
    if "hidden_states" in kwargs:
        return args, kwargs | {"hidden_states": x}
    return (x, *args[1:]), kwargs


def _picked(x: Tensor, columns_BN: Tensor) -> Tensor:
    """[B, N, …]: these columns of each row of [B, n, …]."""
    rows_B1 = torch.arange(len(x), device=x.device)[:, None]
    return x[rows_B1, columns_BN.to(x.device)]


def _states(layer: Any) -> list[Tensor]:
    """The states that a layer has now, [B, …]."""
    return [x for kind in STATES for x in getattr(layer, kind).values() if x is not None]


def _set_states(layer: Any, states: Sequence[Tensor]) -> None:
    new = iter(states)
    for kind in (getattr(layer, name) for name in STATES):
        kind.update({index: next(new) for index, x in kind.items() if x is not None})
