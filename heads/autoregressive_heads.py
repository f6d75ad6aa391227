"""Autoregressive heads, as in EAGLE: each draft token is computed from the drafter's last state.

One step reads a hidden state and the embedding of the next token. It returns the next hidden state,
which predicts the token after that. The first state comes from the target, the later ones from the
drafter. Steps attend to the text, or to a window of it. In the decode loop the drafter keeps its
own key-value cache. Entries of committed tokens are computed from the target's features, entries of
draft tokens from the drafter's states. The drafter's states are dropped after each draft.

Shapes: B rows, n tokens, T tokens of a text, F features of a token, H hidden size.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.base.device import to_device
from decode.draft import Contexts
from decode.draw.sampling import Sampling
from decode.shapes import Growth
from distill.flops import TextFlops, attention_flops, products_flops
from heads.heads_drafter import AttendingDrafter, AttendingHeads, AttendingOptions
from heads.heads_module import (
    HeadBatch,
    Prediction,
    TokenHeads,
    shift_left,
    trained_positions,
)
from heads.layers.llama_layer import Attend, LayerSettings, Rotary, layer_config
from heads.layers.unrolled_attention import UnrolledAttention


class AutoregressiveOptions(AttendingOptions):
    """Options of all autoregressive heads."""

    layer: LayerSettings | None = None
    """Settings of the decoder layer that differ from the target's. None: it has the target's."""


class AutoregressiveHeads(TokenHeads, AttendingHeads):
    """Heads that draft step by step. A subclass defines one step in `advance`.

    "Head" d is step d after the last token with features. It drafts at depth d and has its own loss
    and figures.

    config: a one-layer llama config that describes the drafter. Engines get it unchanged.
    """

    def __init__(
        self, options: Any, depth: int, model: PreTrainedModel, vocabulary: Tensor | None
    ) -> None:
        super().__init__(options, depth, model, vocabulary)
        self.config = layer_config(model, options.layer)
        self._rotary = Rotary(self.config)

    @abstractmethod
    def advance(
        self,
        states: Tensor,
        embedded: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Tensor:
        """Return the next states [B, n, H].

        states: [B, n, H]. embedded: [B, n, H], the embeddings of the next tokens.
        position_embeddings: cos and sin of the positions.
        """

    def readout(self, states: Tensor) -> Tensor:
        """[..., H]: the input of the output layer, computed from states [..., H]."""
        return states

    def with_noise(self, features: Tensor) -> Tensor:
        """[B, T, F]: the features used in training, possibly with noise added."""
        return features

    def extra_loss(
        self, states: Tensor, batch: HeadBatch, depth: int, positions: Tensor
    ) -> Tensor | None:
        """The extra loss (see `Prediction`) for the states [n, H] of step `depth` at `positions`.

        positions: bool [B, T] with n True values.
        """
        return None

    def step(self, states: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the next states [B, n, H].

        states: [B, n, H]. tokens: int64 [B, n], the tokens that follow. positions: int64 [B, n] or
        [1, n], the positions of `states`.
        """
        dtype = self.dtype
        states, embedded = states.to(dtype), self.embeddings(tokens).to(dtype)
        return self.advance(states, embedded, self._rotary(positions, states), attend)

    def body_flops(self) -> TextFlops:
        """Each of the `parts` steps goes through all weights but those of `fuse`."""
        parts = [part for name, part in self.named_children() if name not in ("output", "fc")]
        per_token = products_flops(self.get_submodule("fc")) + self.parts * products_flops(*parts)
        width = self.parts * self.config.num_attention_heads * self.config.head_dim
        return TextFlops(per_token) + attention_flops(width, trained=True)

    def predictions(self, batch: HeadBatch, depths: Sequence[int]) -> Iterator[Prediction]:
        features = batch.of(self.captured_layers).to(self.dtype)
        states = self.fuse(self.with_noise(features))
        attention = UnrolledAttention(self.window)
        positions = torch.arange(states.shape[1], device=states.device)[None]
        for depth in range(1, max(depths) + 1):
            tokens = shift_left(batch.input_ids, depth)
            attend = attention.at(depth)
            states = self.recomputed(self.step, states, tokens, positions + depth - 1, attend)
            if depth in depths:
                trained = trained_positions(batch.loss_mask, depth)
                trained_states = states[trained]
                extra_loss = self.extra_loss(trained_states, batch, depth, trained)
                yield Prediction(depth, trained, self.readout(trained_states), extra_loss)


class AutoregressiveDrafter(AttendingDrafter):
    """Drafts in any shape, at most `depth` deep.

    Entry i of a row's cache is a step that reads the features of token i and the embedding of token
    i + 1. So the last entry predicts the next token of the text. Draft nodes use the slots after
    the last entry.
    """

    heads: AutoregressiveHeads

    def growth(self, contexts: Contexts, sampling: Sampling, max_depth: int) -> Growth:
        return _Growth(self, contexts, sampling, max_depth)

    def layer(self, contexts: Contexts, columns: np.ndarray, states: Tensor) -> Tensor:
        tokens = np.take_along_axis(contexts.tokens, columns + 1, axis=1)
        device = states.device
        return self.heads.step(
            states,
            to_device(tokens, device),
            to_device(columns, device),
            self.attention(columns[:, 0], columns.shape[1]),
        )


class _Growth(Growth):
    """states: [B, 1 + m, H], the states of the end of the text and of the m fed nodes.

    The steps of their children read these states.
    """

    def __init__(
        self,
        drafter: AutoregressiveDrafter,
        contexts: Contexts,
        sampling: Sampling,
        max_depth: int,
    ) -> None:
        heads = drafter.heads
        super().__init__(
            contexts, sampling, drafter.states.device, drafter.vocab_size, heads.vocabulary
        )
        self.drafter, self.heads = drafter, heads
        self.entries = contexts.lengths - 1  # [B]
        self.first_B1 = to_device(self.entries, self.device)[:, None]
        self.states = drafter.newest(contexts)[:, None]
        drafter.place_chain(self.entries, max_depth)

    def _first(self) -> Tensor:
        return self._logits(self.states)[:, 0]

    def _extend(self, count: int) -> Tensor:
        before = self.fed.shape[1] - count
        if self.ancestors is None:
            # In a chain, each step reads the output of the previous step.
            for node in range(before, before + count):
                attend = self.drafter.chain_attention(self.entries, self.first_B1, node)
                token = self.fed[:, node : node + 1]
                self._feed(self.states[:, -1:], token, self.first_B1 + node, attend)
        else:
            visible = self.ancestors[:, before:]
            order = torch.arange(visible.shape[2], device=self.device)
            # The parent is the ancestor that was fed last. 0 is the root.
            parents = torch.where(visible & (order < order[before:, None]), order + 1, 0).amax(2)
            rows_B1 = torch.arange(self.rows, device=self.device)[:, None]
            positions = self.first_B1 + visible.sum(2) - 1
            attend = self.drafter.attention(self.entries + before, count, self.entries, visible)
            self._feed(self.states[rows_B1, parents], self.fed[:, before:], positions, attend)
        return self._logits(self.states[:, -count:])

    def _feed(self, states: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> None:
        """Run the steps of n more nodes and append their states.

        states: [B, n, H], the states of their parents. Keys and values go to the slots after the
        last entry.
        """
        new_states = self.heads.step(states, tokens, positions, attend)
        self.states = torch.cat([self.states, new_states], 1)

    def _logits(self, states: Tensor) -> Tensor:
        return self.heads.output.at(1, self.heads.readout(states))
