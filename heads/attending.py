"""Drafters with a layer of their own that attends to the whole text, as a cache makes it cheap.

Shapes: B rows, n tokens, m entries that are missing, H hidden size.
"""

from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor

from decode.contexts import Contexts
from decode.target.hidden_states import Features
from decode.target.slots import Slots
from heads.base import Heads
from heads.drafter import HeadsDrafter
from heads.layer import SlotAttention


class AttendingHeads(Heads):
    """Heads among which there is such a layer; a kind says what it reads first."""

    def fuse(self, features: Tensor) -> Tensor:
        """[..., H]: the target's features [..., F] as the states that the layer reads first."""
        return features


class AttendingDrafter(HeadsDrafter):
    """Entry i of a row's cache is the layer's for token i, made of the target's features of it. A
    text of L tokens has L − 1 of them: the last token's features are still to come. Features are
    kept as they are read, and entries are made when there is a draft to make: also after rounds in
    which another drafter drafted. What a draft itself needs takes the slots after the last entry,
    and the next round's entries are written over it.
    """

    heads: AttendingHeads

    def start(self, contexts: Contexts) -> None:
        rows, capacity = contexts.tokens.shape
        some = next(self.heads.parameters())
        self.states = some.new_zeros(rows, capacity, self.heads.hidden_size)
        self.slots = Slots(1, rows, capacity, some.device)
        self.known = np.zeros(rows, dtype=np.int64)  # [B]: tokens whose features are there
        self.cached = np.zeros(rows, dtype=np.int64)  # [B]: entries that are in the cache
        self._read = self.known > 0

    def read(self, features: Features) -> None:
        fused = self.heads.fuse(features.of(self.taps).to(self.states.dtype))
        count = fused.shape[1]
        rows_B1 = torch.arange(len(self.known), device=fused.device)[:, None]
        first_B1 = torch.as_tensor(self.known, device=fused.device)[:, None]
        # What lies past a row's own count is written over before it is read.
        self.states[rows_B1, first_B1 + torch.arange(count, device=fused.device)] = fused
        self.known = self.known + features.counts
        self._read = self.known > 0

    @abstractmethod
    def layer(self, contexts: Contexts, columns: np.ndarray, states: Tensor) -> Tensor:
        """[B, m, H]: what the layer makes of the entries `columns`, int [B, m], whose states are
        [B, m, H]; their keys and values go into the cache."""

    def prefill(self, contexts: Contexts) -> None:
        self._make(contexts, np.maximum(contexts.lengths - 2, 0))

    def newest(self, contexts: Contexts) -> Tensor:
        """[B, H]: what the layer makes of each row's last entry, after all that are missing."""
        entries = contexts.lengths - 1
        made, first = self._make(contexts, entries)
        # A row without entries drafts nothing, whatever is taken for it.
        last = torch.as_tensor(np.maximum(entries - first - 1, 0), device=made.device)
        return made[torch.arange(len(made), device=made.device), last]

    def _make(self, contexts: Contexts, entries: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Make the entries up to `entries`, int [B], that are missing: what the layer makes of
        them, [B, m, H], and the number of each row's first one, int [B].

        Every row has as many as the row that lacks most; for the others that repeats a few, which
        writes the same keys and values again and keeps the batch rectangular.
        """
        lacking = int((entries - self.cached).max())
        first = np.maximum(entries - lacking, 0)
        if not lacking:
            return self.states[:, :0], first
        self.cached = entries.copy()
        columns = first[:, None] + np.arange(lacking)
        rows_B1 = torch.arange(len(columns), device=self.states.device)[:, None]
        states = self.states[rows_B1, torch.as_tensor(columns, device=self.states.device)]
        return self.layer(contexts, columns, states), first

    def attention(
        self,
        start: np.ndarray,
        count: int,
        root: np.ndarray | None = None,
        ancestors: Tensor | None = None,
    ) -> SlotAttention:
        """Of `count` tokens of each row, whose keys and values go to the slots from start, int [B],
        on. root, ancestors: for nodes of a tree, the slot where it begins, int [B], and which of
        its nodes each may see, as `Slots.mask` says."""
        self.slots.place(start, count)
        base = start if root is None else root
        base_B1 = torch.as_tensor(base, device=self.states.device)[:, None]
        mask = self.slots.mask(base_B1, start, count, ancestors)
        return SlotAttention(self.slots.layers[0], mask)

    def keep_rows(self, rows: Tensor) -> None:
        super().keep_rows(rows)
        here = rows.to(self.states.device)
        self.states = self.states.index_select(0, here)
        self.slots.keep_rows(here)
        kept = rows.cpu().numpy()
        self.known, self.cached = self.known[kept], self.cached[kept]
