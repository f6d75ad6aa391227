"""The drafters for heads: they read hidden states in the decode loop and load stored heads.

Shapes: B rows, n tokens, m missing cache entries, F features of a token, H hidden size.
"""

import copy
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from decode.base.device import to_device
from decode.base.errors import UserError
from decode.draft import Contexts, Draft, Limits
from decode.drafters.trained import ShapedDrafter, take_weights
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.model.cache.cached_model import CachedLM
from decode.model.cache.pass_size import pads_little
from decode.model.cache.sliding_window import SlidingWindow
from decode.model.cache.slots import WAITING, Slots
from decode.model.features import Features
from decode.model.forward.attention_mask import AttentionMask, SlotAttention
from decode.model.forward.low_rank import LowRank, adapted
from decode.model.loading import DTYPES, Target
from decode.shapes import Growth, Shape
from decode.verification import Verification
from heads.attending_heads import AttendingHeads
from heads.heads_directory import load_heads
from heads.heads_module import Heads


class HeadsDrafter(ShapedDrafter):
    """Drafts in any shape, at most as deep as there are heads.

    It drafts from the hidden states of the last token that the target has read. The verification
    pass provides them. So one target call verifies a draft and gives the input of the next draft
    (1811.03115, section 4).

    vocab_size: the target's vocabulary size. shape: a chain by default. Raises UserError for a
    shape deeper than the heads.
    """

    trained = True
    vocab_size: int
    per_row = MappingProxyType({"_has_features": False})
    _has_features: np.ndarray  # [B]

    def __init__(self, heads: Heads, vocab_size: int, shape: Shape | None = None) -> None:
        super().__init__(vocab_size, shape, depth_limit=heads.depth)
        self.module = self.heads = heads.eval().requires_grad_(False)
        weight = next(heads.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.captured_layers = heads.captured_layers
        require_depth(self.shape, heads)
        self.newest_features = torch.zeros(0)  # [B, F]

    @classmethod
    def load(cls, path: Path, target: Target, *, dtype: str) -> Self:
        """Load a directory written by `heads.heads_directory.save_heads`."""
        heads, shape = load_heads(path, target, DTYPES[dtype])
        return cls(heads, target.vocab_size, shape)

    @abstractmethod
    def growth(self, contexts: Contexts, sampling: Sampling, max_depth: int) -> Growth:
        """Return the object that predicts the next tokens after the text and after each node.

        max_depth: the max depth of the draft.
        """

    def with_shape(self, shape: Shape) -> Self:
        return type(self)(self.heads, self.vocab_size, shape)

    def with_adapter(self, adapters: Mapping[str, LowRank]) -> Self:
        """The same drafter with an adapter on its heads (`decode.model.forward.low_rank`)."""
        return type(self)(adapted(self.heads, adapters, keep=self), self.vocab_size, self.shape)

    def start(self, contexts: Contexts) -> None:
        super().start(contexts)
        self.newest_features = torch.zeros(0)

    def observe(self, verification: Verification) -> None:
        if verification.features is not None:
            self.read(verification.features)

    def add_rows(self, contexts: Contexts, verification: Verification) -> None:
        first = len(self._has_features)
        super().add_rows(contexts, verification)
        if verification.features is not None:
            self.read(verification.features, first)
        elif self.newest_features.ndim == 2:
            nothing = self.newest_features.new_zeros(0, self.newest_features.shape[1])
            self.newest_features = _of_rows(nothing, self.newest_features, len(contexts.lengths))

    def read(self, features: Features, first: int = 0) -> None:
        """Take the target's hidden states of new tokens, in the order of the text, for the rows
        from `first` on."""
        newest = features.newest(self.captured_layers).to(self.dtype)
        self.newest_features = _of_rows(newest, self.newest_features, first)
        self._has_features = np.append(self._has_features[:first], features.counts > 0)

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        # A prompt of one token has no features before its first pass.
        depths = np.where(self._has_features, np.minimum(limits.depths, self.heads.depth), 0)
        most = int(depths.max(initial=0))
        if not most:
            return Draft.none(len(contexts.lengths), "cpu")
        head_limits = replace(limits, depths=depths) if (depths < limits.depths).any() else limits
        growth = self.growth(contexts, sampling, most)
        growth.depths = depths if (depths < most).any() else None
        return self.shape.grow(growth, head_limits, sampling, rng)

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace some weights of the heads.

        This is safe in the middle of a text, because the heads read only the target's hidden
        states. Never call it during a draft: q must come from one set of weights. Raises UserError
        for weights that the heads do not have, and then changes nothing.
        """
        take_weights(self.heads, weights)

    def keep_rows(self, rows: np.ndarray) -> None:
        super().keep_rows(rows)
        if len(self.newest_features):
            at = to_device(rows, self.newest_features.device)
            self.newest_features = self.newest_features.index_select(0, at)


def require_depth(shape: Shape, heads: Heads) -> None:
    """Raise UserError for a shape deeper than the heads."""
    if (shape.depth or 0) > heads.depth:
        raise UserError(
            f"the tree is {shape.depth} deep, but the heads draft {heads.depth} tokens; "
            "make the tree shallower, or train more heads"
        )


def _of_rows(new: Tensor, old: Tensor, first: int) -> Tensor:
    """[B, F]: the values of the rows before `first`, then new ones, [B', F]. Rows that never had
    values get zeros."""
    before = old[:first] if old.ndim == new.ndim else new[:0]
    missing = new.new_zeros(first - len(before), new.shape[1])
    return torch.cat([before, missing, new])


def _together(counts: np.ndarray) -> list[slice]:
    """The rows that are fed in one pass, of counts tokens each, int [B]: all, or each alone where
    they differ much. Layers of most heads compute padding, EAGLE's do not; to store hidden states
    with a little padding takes less time than to make a list of them."""
    if pads_little(counts, int(counts.max(initial=0))):
        return [slice(0, len(counts))]
    return [slice(row, row + 1) for row in range(len(counts))]


class AttendingDrafter(HeadsDrafter):
    """Drafter with an extra layer that attends to the whole text; a key-value cache makes it cheap.

    Entry i of a row's cache holds the layer's keys and values for token i. They are computed from
    the target's features of this token. A text of L tokens has L − 1 entries, because the features
    of the last token do not exist yet. `read` stores features at once, but those of plain passes
    together, so that a drafter that rests costs nothing. Missing entries are computed only before a
    draft, also after rounds in which another drafter drafted. The draft itself uses the slots after
    the last entry. The entries of the next round overwrite them.

    With a window, a layer gets only the slots inside of it, and the sinks. Entries that no later
    one depends on are never computed.
    """

    decoder_only = True
    per_row = MappingProxyType(HeadsDrafter.per_row | {"stored_features": 0, "cached_entries": 0})
    stored_features: np.ndarray  # [B]: tokens with stored features
    cached_entries: np.ndarray  # [B]: entries in the cache
    _first = 0  # the first of the rows that the layer reads
    heads: AttendingHeads

    def attach(self, lm: CachedLM) -> None:
        self._pass_tokens = lm.pass_tokens

    @property
    def token_bytes(self) -> int:
        """Of the input states, and of keys and values in each layer."""
        projections = tuple(f"{x}_proj.{y}weight" for x in "kv" for y in ("", "base."))
        sizes = [len(x) for name, x in self.heads.named_parameters() if name.endswith(projections)]
        return (self.heads.hidden_size + sum(sizes)) * self.heads.dtype.itemsize

    def start(self, contexts: Contexts) -> None:
        super().start(contexts)
        self._unstored: list[Tensor] = []  # of plain passes, [B, 1, F] each
        rows, capacity = contexts.tokens.shape
        heads, device = self.heads, self.device
        self._inputs = Slots(0, rows, capacity, device, states=1)
        self.slots = Slots(heads.attending_layers, rows, capacity + heads.spare_slots, device)

    @property
    def states(self) -> Tensor:
        """[B, C, H]: the input states of all entries, in slots of their own."""
        return self._inputs.state_slots

    def add_rows(self, contexts: Contexts, verification: Verification) -> None:
        self._store()
        rows, capacity = contexts.tokens.shape
        new = rows - len(self.stored_features)
        self.slots.add_rows(new, capacity + self.heads.spare_slots)
        self._inputs.add_rows(new, capacity)
        super().add_rows(contexts, verification)

    def read(self, features: Features, first: int = 0) -> None:
        values = features.of(self.captured_layers)
        if not first and values.shape[1] == 1 and features.counts.all():
            self._unstored.append(values)
            if len(self._unstored) == WAITING:
                self._store()
            return
        self._store()
        self._store_of(values, features.counts, first)

    def _store(self) -> None:
        """Store the hidden states of plain passes that wait."""
        if self._unstored:
            values, self._unstored = torch.cat(self._unstored, 1), []
            rows, count, _ = values.shape
            self._store_of(values, np.full(rows, count), 0)

    def _store_of(self, values: Tensor, counts: np.ndarray, first: int) -> None:
        """Store hidden states, [B', n, F], of the first counts[b], int [B'], of these tokens."""
        fused = self.heads.fuse(values.to(self.dtype))
        stored = self.stored_features[first:]
        for rows in _together(counts):  # their padding is overwritten later
            count = int(counts[rows].max(initial=0))
            self._keep(fused[rows, :count], stored[rows], first + rows.start)
        stored += counts
        self._has_features = self.stored_features > 0

    def _keep(self, states: Tensor, stored: np.ndarray, first: int) -> None:
        """Store the input states of the next entries, [B', n, H], of the rows from `first` on."""
        self._inputs.place(stored, states.shape[1], first=first)
        self._inputs.keep_states([states])

    def with_window(self, window: SlidingWindow) -> Self:
        heads = copy.copy(self.heads)  # shares all weights
        changes = {"window": window.size, "sinks": window.sinks}
        heads.options = self.heads.options.model_copy(update=changes)
        heads.options.require_window()
        return type(self)(heads, self.vocab_size, self.shape)

    def text_states(self, row: int) -> Tensor:
        """[L − 1, H]: what `fuse` made of the hidden states of a row's text, which has L tokens."""
        self._store()
        return self.states[row, : int(self.stored_features[row])]

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """As `HeadsDrafter.take_weights`. Keys and values are computed again with the new weights,
        and input states of the texts so far stay."""
        super().take_weights(weights)
        self.cached_entries[:] = 0

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        self._store()
        return super().draft(contexts, limits, sampling, rng)

    @abstractmethod
    def layer(self, contexts: Contexts, columns: np.ndarray, states: Tensor) -> Tensor:
        """[B, m, H]: the layer's output for the entries `columns`, int [B, m].

        states: [B, m, H], the input states of these entries. Writes their keys and values to the
        cache. New are those from `_since` to before `_until`, int [B] each: what is returned of the
        others means nothing.
        """

    def prefill(self, contexts: Contexts, first: int = 0) -> None:
        """Long texts take several passes, as in the target (`CachedLM.read`), and texts of
        different lengths one pass each."""
        self._store()
        entries = np.maximum(contexts.lengths - 2, 0)
        self.skip_unseen(contexts, entries, first)
        for some in _together((entries - self.cached_entries)[first:]):
            rows = slice(first + some.start, first + some.stop)
            most = max(self._pass_tokens // max(rows.stop - rows.start, 1), 1)
            while (self.cached_entries < entries)[rows].any():
                self._compute(contexts, np.minimum(entries, self.cached_entries + most), rows)

    def newest(self, contexts: Contexts, entries: np.ndarray | None = None) -> Tensor:
        """[B, H]: the layer's output for each row's last entry. Computes all missing entries.

        entries: int [B], the number of entries of each row. None: one less than the text has
        tokens.
        """
        entries = contexts.lengths - 1 if entries is None else entries
        outputs, first = self._fill_cache(contexts, entries)
        # A row without entries drafts nothing, so its value here does not matter.
        last = to_device(np.maximum(entries - first - 1, 0), outputs.device)
        return outputs[torch.arange(len(entries), device=outputs.device), last]

    def _fill_cache(self, contexts: Contexts, entries: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Compute the missing entries before entry `entries`, int [B], of each row.

        Returns the layer's output for them, [B, m, H], and the index of each row's first computed
        entry, int [B]. m is the largest number of missing entries of any of these rows. The others
        compute some entries again. This writes the same keys and values and keeps the batch
        rectangular.
        """
        self.skip_unseen(contexts, entries)
        return self._compute(contexts, entries, slice(0, len(entries)))

    def skip_unseen(self, contexts: Contexts, entries: np.ndarray, since: int = 0) -> None:
        """Count entries as cached that no entry from `entries`, int [B], on depends on, for the
        rows from `since` on. Computes the sinks before that."""
        window = self.heads.window
        if window is None:
            return
        cached = self.cached_entries[since:].copy()
        needed = entries[since:] - 1 - self.heads.stacked_layers * (window.size - 1)
        skipping = needed > cached
        if (skipping & (cached < window.sinks)).any():
            rows = slice(since, len(entries))
            self._compute(contexts, np.minimum(entries, window.sinks), rows)
        self.cached_entries[since:] = np.maximum(cached, needed)

    def _compute(
        self, contexts: Contexts, entries: np.ndarray, rows: slice
    ) -> tuple[Tensor, np.ndarray]:
        """As `_fill_cache`, of these rows, [B', …]."""
        self._until = np.maximum(entries[rows], 1)
        self._since = np.minimum(self.cached_entries[rows], self._until - 1)
        columns, states = self.take_missing(entries, rows)
        first = columns[:, 0] if columns.shape[1] else entries[rows]
        if not columns.shape[1]:
            return states, first
        own, self._first = contexts.rows_from(rows.start, rows.stop), rows.start
        try:  # `replaced` would do, but a draft has time for few calls
            return self.layer(own, columns, states), first
        finally:
            self._first = 0

    def take_missing(
        self, entries: np.ndarray, rows: slice = slice(None)
    ) -> tuple[np.ndarray, Tensor]:
        """The missing entries before entry `entries`, int [B], of each of these rows, which count
        as cached from now on: int [B', m]; and their input states, [B', m, H]."""
        entries, states, cached = entries[rows], self.states[rows], self.cached_entries[rows]
        missing = int((entries - cached).max())
        cached[:] = entries
        columns = np.maximum(entries - missing, 0)[:, None] + np.arange(missing)
        rows_B1 = torch.arange(len(columns), device=states.device)[:, None]
        return columns, states[rows_B1, to_device(columns, states.device)]

    def attention(
        self,
        start: np.ndarray,
        count: int,
        root: np.ndarray | None = None,
        ancestors: Tensor | None = None,
        counts: np.ndarray | None = None,
    ) -> SlotAttention:
        """Attention for `count` tokens of each row, in the first layer; see `attentions`."""
        return self.attentions(start, count, root, ancestors, counts=counts)[0]

    def attentions(
        self,
        start: np.ndarray,
        count: int,
        root: np.ndarray | None = None,
        ancestors: Tensor | None = None,
        depths: Tensor | None = None,
        counts: np.ndarray | None = None,
    ) -> list[SlotAttention]:
        """Attention for `count` tokens of each row, in each layer.

        Their keys and values go to consecutive slots from `start`, int [B]. For the nodes of a
        tree, root is the slot of its first node, int [B], ancestors tells which nodes each node
        may see, and depths, int64 [1 or B, n], how many positions each node is after the root.
        counts: as for `Slots.place`.
        """
        window = self.heads.window
        base_B1 = self.place(start, count, root, window, counts)
        visible = self.slots.mask(base_B1, count, ancestors, window, depths)
        mask = AttentionMask(visible, self.dtype)
        return [SlotAttention(layer, mask) for layer in self.slots.layers]

    def place(
        self,
        start: np.ndarray,
        count: int,
        root: np.ndarray | None = None,
        window: SlidingWindow | None = None,
        counts: np.ndarray | None = None,
    ) -> Tensor:
        """Have `count` tokens of each row go to the slots from `start`, int [B].

        Returns the slot of the root, or else the first slot, int64 [B, 1]. root: as for
        `attentions`. window: what attention gets; None: all slots. counts: as for `Slots.place`.
        """
        self.slots.place(start, count, window, root, counts=counts, first=self._first)
        return to_device(start if root is None else root, self.device)[:, None]

    def keep_rows(self, rows: np.ndarray) -> None:
        self._store()
        super().keep_rows(rows)
        self._inputs.keep_rows(rows)
        self.slots.keep_rows(rows)
