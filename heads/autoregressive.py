"""Heads that draft token by token from states of their own: EAGLE's.

One step reads a hidden state and the embedding of the token that follows, and makes the next hidden
state, from which the token after that one is predicted. The first state is the target's; the
others are the drafter's own. Steps attend to all of the text: in the loop the drafter keeps keys
and values of its own, made from the target's features for what is committed and from its own
states for what is drafted. So nothing that it imagined outlives its draft.

Shapes: B rows, n tokens, T tokens of a text, F features of a token, H hidden size.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.contexts import Contexts
from decode.sampling import Sampling
from decode.trees.growth import Growth
from heads.attending import AttendingDrafter, AttendingHeads
from heads.base import Given, Prediction, ahead, trained_places
from heads.embeddings import TokenHeads
from heads.layer import Attend, Rotary, UnrolledAttention, layer_config


class AutoregressiveHeads(TokenHeads, AttendingHeads):
    """A kind says what a step computes. "Head" d is step d after the last token with features: what
    its loss and its figures are of, and what is drafted at depth d.

    config: of the llama whose one layer this is; engines are given it as it is.
    """

    def __init__(
        self, options: Any, depth: int, model: PreTrainedModel, vocabulary: Tensor | None
    ) -> None:
        super().__init__(options, depth, model, vocabulary)
        self.config = layer_config(model)
        self._rotary = Rotary(self.config)

    @abstractmethod
    def advance(
        self, states: Tensor, embedded: Tensor, turns: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """The next states [B, n, H], of states and the next tokens' embeddings [B, n, H]; turns:
        cos and sin of their positions."""

    def readout(self, states: Tensor) -> Tensor:
        """[..., H]: what the output layer reads of states [..., H]."""
        return states

    def blurred(self, features: Tensor) -> Tensor:
        """[B, T, F]: the target's features as they are trained on, perhaps with noise."""
        return features

    def extra(self, states: Tensor, given: Given, depth: int, places: Tensor) -> Tensor | None:
        """See `Prediction`, of step `depth`'s states [n, H] at the places."""
        return None

    def step(self, states: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The next states [B, n, H], of states [B, n, H] and the tokens that follow, int64 [B, n];
        positions: int64 [B, n] or [1, n], those of the tokens whose states are read."""
        states = states.to(self.dtype)
        turns = self._rotary(positions, states)
        return self.advance(states, self.embeddings(tokens).to(self.dtype), turns, attend)

    def predictions(self, given: Given, depths: Sequence[int]) -> Iterator[Prediction]:
        features = torch.cat([given.features[tap] for tap in self.taps], -1).to(self.dtype)
        states = self.fuse(self.blurred(features))
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


class AutoregressiveDrafter(AttendingDrafter):
    """Drafts in any shape, no deeper than `depth`.

    Entry i of a row's cache is a step from the target's features of token i and token i + 1, so
    that the last one says what may follow the text. The nodes of a draft take the slots after it.
    """

    heads: AutoregressiveHeads

    def growth(self, contexts: Contexts, sampling: Sampling, deepest: int) -> Growth:
        return _Growth(self, contexts, sampling)

    def layer(self, contexts: Contexts, columns: np.ndarray, states: Tensor) -> Tensor:
        tokens = np.take_along_axis(contexts.tokens, columns + 1, axis=1)
        device = states.device
        return self.heads.step(
            states,
            torch.as_tensor(tokens, device=device),
            torch.as_tensor(columns, device=device),
            self.attention(columns[:, 0], columns.shape[1]),
        )


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
        self.states = self.drafter.newest(self.contexts)[:, None]
        return self._logits(self.states)[:, 0]

    def _extend(self, count: int) -> Tensor:
        before = self.fed.shape[1] - count
        if self.ancestors is None:
            # In a chain each node's step reads what the step before it made.
            for place in range(before, before + count):
                positions = torch.as_tensor(self.entries + place, device=self.device)[:, None]
                token = self.fed[:, place : place + 1]
                self._feed(self.states[:, -1:], token, positions, place)
        else:
            seen = self.ancestors[:, before:]
            order = torch.arange(seen.shape[2], device=self.device)
            # Of a node's ancestors its parent was fed last; 0 is the root.
            above = torch.where(seen & (order < order[before:, None]), order + 1, 0).amax(2)
            rows_B1 = torch.arange(self.rows, device=self.device)[:, None]
            entries_B1 = torch.as_tensor(self.entries, device=self.device)[:, None]
            positions = entries_B1 + seen.sum(2) - 1
            self._feed(self.states[rows_B1, above], self.fed[:, before:], positions, before, seen)
        return self._logits(self.states[:, -count:])

    def _feed(
        self,
        states: Tensor,
        tokens: Tensor,
        positions: Tensor,
        before: int,
        seen: Tensor | None = None,
    ) -> None:
        """Steps of n more nodes, of their parents' states [B, n, H]; `before` were fed before.
        Their keys and values go to the slots after the last entry. seen: of nodes of a tree, which
        of the nodes each may see."""
        root = None if seen is None else self.entries
        attend = self.drafter.attention(self.entries + before, tokens.shape[1], root, seen)
        made = self.heads.step(states, tokens, positions, attend)
        self.states = torch.cat([self.states, made], 1)

    def _logits(self, states: Tensor) -> Tensor:
        return self.heads.output.at(1, self.heads.readout(states))
