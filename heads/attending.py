"""Drafters with an extra layer that attends to the whole text. A key-value cache makes it cheap.

Shapes: B rows, n tokens, m missing cache entries, H hidden size.
"""

from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor

from decode.draft import Contexts
from decode.target.hidden_states import Features
from decode.target.slots import Slots
from heads.base import Heads
from heads.drafter import HeadsDrafter
from heads.layer import SlotAttention


class AttendingHeads(Heads):
    """Heads with a layer that attends to the whole text. A subclass defines its input in `fuse`."""

    def fuse(self, features: Tensor) -> Tensor:
        """[..., H]: the layer's first input states, computed from the features [..., F]."""
        return features


class AttendingDrafter(HeadsDrafter):
    """Drafter that keeps a key-value cache for the extra layer.

    Entry i of a row's cache holds the layer's keys and values for token i. They are computed from
    the target's features of this token. A text of L tokens has L − 1 entries, because the features
    of the last token do not exist yet. `read` stores features at once. Missing entries are computed
    only before a draft, also after rounds in which another drafter drafted. The draft itself uses
    the slots after the last entry. The entries of the next round overwrite them.
    """

    heads: AttendingHeads

    def start(self, contexts: Contexts) -> None:
        rows, capacity = contexts.tokens.shape
        some = next(self.heads.parameters())
        self.states = some.new_zeros(rows, capacity, self.heads.hidden_size)
        self.slots = Slots(1, rows, capacity, some.device)
        self.known = np.zeros(rows, dtype=np.int64)  # [B]: tokens with stored features
        self.cached = np.zeros(rows, dtype=np.int64)  # [B]: entries in the cache
        self._read = self.known > 0

    def read(self, features: Features) -> None:
        fused = self.heads.fuse(features.of(self.captured_layers).to(self.states.dtype))
        count = fused.shape[1]
        rows_B1 = torch.arange(len(self.known), device=fused.device)[:, None]
        first_B1 = torch.as_tensor(self.known, device=fused.device)[:, None]
        # Values past a row's count are overwritten before they are read.
        self.states[rows_B1, first_B1 + torch.arange(count, device=fused.device)] = fused
        self.known = self.known + features.counts
        self._read = self.known > 0

    @abstractmethod
    def layer(self, contexts: Contexts, columns: np.ndarray, states: Tensor) -> Tensor:
        """[B, m, H]: the layer's output for the entries `columns`, int [B, m].

        states: [B, m, H], the input states of these entries. Writes their keys and values to the
        cache.
        """

    def prefill(self, contexts: Contexts) -> None:
        self._make(contexts, np.maximum(contexts.lengths - 2, 0))

    def newest(self, contexts: Contexts) -> Tensor:
        """[B, H]: the layer's output for each row's last entry. Computes all missing entries."""
        entries = contexts.lengths - 1
        made, first = self._make(contexts, entries)
        # A row without entries drafts nothing, so its value here does not matter.
        last = torch.as_tensor(np.maximum(entries - first - 1, 0), device=made.device)
        return made[torch.arange(len(made), device=made.device), last]

    def _make(self, contexts: Contexts, entries: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Compute the missing entries of each row before entry `entries`, int [B].

        Returns the layer's output for them, [B, m, H], and the index of each row's first computed
        entry, int [B]. m is the largest number of missing entries of any row. The other rows
        compute some entries again. This writes the same keys and values and keeps the batch
        rectangular.
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
        """Attention for `count` tokens of each row.

        Their keys and values go to consecutive slots from `start`, int [B]. For the nodes of a
        tree, root is the slot of its first node, int [B], and ancestors tells which nodes each node
        may see (see `Slots.mask`).
        """
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
