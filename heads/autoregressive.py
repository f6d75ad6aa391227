"""Heads that draft token by token from states of their own: EAGLE's.

One step reads a hidden state and the embedding of the token that follows, and makes the next hidden
state, from which the token after that one is predicted. The first state is the target's; the
others are the drafter's own. Steps attend to all of the text: in the loop the drafter keeps keys
and values of its own, made from the target's features for what is committed and from its own
states for what is drafted. So nothing that it imagined outlives its draft.

Shapes: B rows, n tokens, T tokens of a text, F features of a token, H hidden size, C slots.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.contexts import Contexts
from decode.features import Features
from decode.growth import Growth
from decode.sampling import Sampling
from decode.slots import Slots
from heads.base import Given, Heads, Prediction, ahead, trained_places
from heads.drafter import HeadsDrafter
from heads.embeddings import BorrowedEmbeddings, require_embeddings
from heads.layer import Attend, Rotary, SlotAttention, UnrolledAttention, layer_config


class AutoregressiveHeads(Heads):
    """A kind says what a step computes. "Head" d is step d after the last token with features: what
    its loss and its figures are of, and what is drafted at depth d.

    config: of the llama whose one layer this is; engines are given it as it is.
    """

    def __init__(
        self, options: Any, depth: int, model: PreTrainedModel, vocabulary: Tensor | None
    ) -> None:
        super().__init__(options, depth, model, vocabulary)
        require_embeddings(model, self.hidden_size)
        self.config = layer_config(model)
        self.embeddings = BorrowedEmbeddings()
        # In a list, as it is neither stored nor moved with the module.
        self._rotary: list[Rotary] = []

    def borrow(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
        super().borrow(model, dtype)
        self.embeddings.borrow(model, dtype)
        self._rotary = [Rotary(self.config, model.device)]

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """[..., H]: the target's features [..., F] as the states that a first step reads."""

    @abstractmethod
    def layer(
        self, states: Tensor, embedded: Tensor, turns: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """The next states [B, n, H], of states and the next tokens' embeddings [B, n, H]; turns:
        cos and sin of their positions."""

    def readout(self, states: Tensor) -> Tensor:
        """[..., H]: what the output layer reads of states [..., H]."""
        return states

    def read(self, features: Tensor) -> Tensor:
        """[B, T, F]: the features that are trained on; noise may be added."""
        return features

    def extra(self, states: Tensor, given: Given, depth: int, places: Tensor) -> Tensor | None:
        """See `Prediction`, of step `depth`'s states [n, H] at the places."""
        return None

    def step(self, states: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The next states [B, n, H], of states [B, n, H] and the tokens that follow, int64 [B, n];
        positions: int64 [B, n] or [1, n], those of the tokens whose states are read."""
        states = states.to(self.dtype)
        turns = self._rotary[0](positions, states)
        return self.layer(states, self.embeddings(tokens).to(self.dtype), turns, attend)

    def predictions(self, given: Given, depths: Sequence[int]) -> Iterator[Prediction]:
        features = torch.cat([given.features[tap] for tap in self.taps], -1).to(self.dtype)
        states = self.fuse(self.read(features))
        attend = UnrolledAttention()
        positions = torch.arange(states.shape[1], device=states.device)[None]
        for depth in range(1, max(depths) + 1):
            tokens = ahead(given.input_ids, depth)
            states = self.step(states, tokens, positions + depth - 1, attend)
            if depth in depths:
                places = trained_places(given.loss_mask, depth)
                own = states[places]
                extra = self.extra(own, given, depth, places)
                yield Prediction(depth, places, self.readout(own), extra)


class AutoregressiveDrafter(HeadsDrafter):
    """Drafts in any shape, no deeper than `depth`.

    Entry i of a row's cache is a step from the target's features of token i and token i + 1; so a
    text of L tokens has L − 1 of them, and the last one says what may follow the text. Features
    are kept as they are read, and steps are taken when there is a draft to make: also after rounds
    in which another drafter drafted. The nodes of a draft take the slots after the last entry, and
    the next round's entries are written over them.
    """

    heads: AutoregressiveHeads

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

    def growth(self, contexts: Contexts, sampling: Sampling, deepest: int) -> Growth:
        return _Growth(self, contexts, sampling)

    def keep_rows(self, rows: Tensor) -> None:
        super().keep_rows(rows)
        here = rows.to(self.states.device)
        self.states = self.states.index_select(0, here)
        self.slots.keep_rows(here)
        kept = rows.cpu().numpy()
        self.known, self.cached = self.known[kept], self.cached[kept]


class _Growth(Growth):
    """states [B, 1 + m, H]: of the text's end and of the m fed nodes, what their children's steps
    read."""

    def __init__(
        self, drafter: AutoregressiveDrafter, contexts: Contexts, sampling: Sampling
    ) -> None:
        heads = drafter.heads
        super().__init__(
            contexts, sampling, drafter.states.device, drafter.vocab_size, heads.vocabulary
        )
        self.drafter, self.heads = drafter, heads
        self.entries = contexts.lengths - 1  # [B]
        self.states = drafter.states[:, :0]

    def _first(self) -> Tensor:
        drafter = self.drafter
        # Every row takes as many steps as the row that lacks most; for the others that repeats a
        # few, which writes the same keys and values again and keeps the batch rectangular.
        lacking = int((self.entries - drafter.cached).max())
        start = np.maximum(self.entries - lacking, 0)
        columns = start[:, None] + np.arange(lacking)
        tokens = np.take_along_axis(self.contexts.tokens, columns + 1, axis=1)
        rows_B1 = torch.arange(self.rows, device=self.device)[:, None]
        places = torch.as_tensor(columns, device=self.device)
        made = self._steps(
            drafter.states[rows_B1, places],
            torch.as_tensor(tokens, device=self.device),
            places,
            start,
        )
        drafter.cached = self.entries.copy()
        # A row without entries drafts nothing, whatever is taken for it.
        last = torch.as_tensor(np.maximum(self.entries - start - 1, 0), device=self.device)
        self.states = made[rows_B1, last[:, None]]
        return self._logits(self.states)[:, 0]

    def _extend(self, count: int) -> Tensor:
        before = self.fed.shape[1] - count
        start = self.entries + before
        base = torch.as_tensor(self.entries, device=self.device)[:, None]
        if self.ancestors is None:
            # In a chain each node's step reads what the step before it made.
            for place in range(before, before + count):
                made = self._steps(
                    self.states[:, -1:],
                    self.fed[:, place : place + 1],
                    base + place,
                    self.entries + place,
                )
                self.states = torch.cat([self.states, made], 1)
        else:
            seen = self.ancestors[:, before:]
            order = torch.arange(seen.shape[2], device=self.device)
            above = seen & (order < order[before:, None])
            # The nearest ancestor was fed last of them; 0 is the root.
            parents = torch.where(above, order + 1, 0).amax(2)
            rows_B1 = torch.arange(self.rows, device=self.device)[:, None]
            made = self._steps(
                self.states[rows_B1, parents],
                self.fed[:, before:],
                base + seen.sum(2) - 1,
                start,
                seen,
            )
            self.states = torch.cat([self.states, made], 1)
        return self._logits(self.states[:, -count:])

    def _steps(
        self,
        states: Tensor,
        tokens: Tensor,
        positions: Tensor,
        start: np.ndarray,
        seen: Tensor | None = None,
    ) -> Tensor:
        """Next states [B, n, H], whose keys and values go to the slots from start, int [B], on.
        seen: of nodes of a tree, which of the nodes each may see."""
        slots, count = self.drafter.slots, tokens.shape[1]
        slots.place(start, count)
        base = start if seen is None else self.entries
        base_B1 = torch.as_tensor(base, device=self.device)[:, None]
        attend = SlotAttention(slots.layers[0], slots.mask(base_B1, start, count, seen))
        return self.heads.step(states, tokens, positions, attend)

    def _logits(self, states: Tensor) -> Tensor:
        return self.heads.output.at(1, self.heads.readout(states))
