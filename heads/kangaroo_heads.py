"""Kangaroo (2404.18911): the target's first layers and a small trained adapter draft.

The drafter shares the target's weights, and its keys and values in the first layers. The adapter
reads the output of these layers, the exit states.

Shapes: B rows, n tokens fed, T tokens of a text, H hidden size, V' draft vocabulary.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from decode.base.device import to_device
from decode.draft import Contexts, Draft, Limits
from decode.drafters import DRAFTERS
from decode.drafters.small_lm import CachedGrowth
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.model.cache.cached_model import CachedLM, LayerView
from decode.model.forward.sublayers import Sublayers
from decode.model.kinds.layer_kinds import require_no_states
from decode.model.loading import Target
from decode.shapes import Growth
from distill.flops import TextFlops, attention_flops, products_flops
from heads.attending_heads import AttendingHeads
from heads.heads_drafter import AttendingDrafter
from heads.heads_module import HEADS, HeadBatch, Prediction, shift_left, trained_positions
from heads.layers.layer_config import layer_config
from heads.layers.llama_layer import Attend, Attention, Rotary
from heads.layers.target_layers import copy_norm
from heads.layers.unrolled_attention import causal_attention
from heads.options import KangarooOptions


class Adapter(nn.Module):
    """Attention with a norm before it, added to the exit states, and a norm for the output layer
    (section 3.1). There is no feed-forward network."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, config.hidden_size)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._spread = config.initializer_range
        self._rotary = Rotary(config)

    @torch.no_grad()
    def init_weights(self, model: PreTrainedModel) -> None:
        """Set init weights with which attention adds nothing, and the norm is the target's."""
        for layer in self.self_attn.children():
            assert isinstance(layer, nn.Linear)
            layer.weight.normal_(std=self._spread)
        self.self_attn.o_proj.weight.zero_()
        self.input_layernorm.weight.fill_(1.0)
        copy_norm(self.norm, model)

    def forward(self, exits: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return [B, n, H], the input of the output layer, for exit states [B, n, H].

        positions: int64 [B, n] or [1, n].
        """
        turns = self._rotary(positions, exits)
        states: Tensor = self.norm(
            exits + self.self_attn(self.input_layernorm(exits), turns, attend)
        )
        return states


@HEADS.register("kangaroo")
class KangarooHeads(AttendingHeads):
    """An adapter that reads the exit states up to a token and predicts the token after it.

    "Head" d predicts at t + d, whose exit state the drafter computes itself, because the target has
    not read that token yet. In training all tokens come from the text, so the output is the same
    for each d. It is computed once, and trained once, as head 1.

    The init weights are ours: the adapter starts as the target without its
    later layers. Raises UserError for an `exit_layer` that leaves no later layer.
    """

    replayed_from = "text"

    @classmethod
    def for_target(cls, options: Any, target: Target) -> Any:
        require_no_states(target.model)
        return super().for_target(options, target)

    def __init__(
        self, options: KangarooOptions, model: PreTrainedModel, vocabulary: Tensor | None = None
    ) -> None:
        super().__init__(options, options.depth, model, vocabulary)
        layers = model.config.get_text_config().num_hidden_layers
        self.skipped = Sublayers.later(options.exit_layer, layers)
        self.captured_layers = (options.exit_layer - 1,)
        self.adapter = Adapter(layer_config(model))
        self.batch_parts = 1

    @torch.no_grad()
    def init_weights(self, model: PreTrainedModel) -> None:
        super().init_weights(model)
        self.adapter.init_weights(model)

    def loss_weights(self, uniform: float) -> dict[int, float]:
        return {1: 1.0}

    def body_flops(self) -> TextFlops:
        products = TextFlops(per_token=products_flops(self.adapter))
        width = self.adapter.self_attn.q_proj.out_features
        return products + attention_flops(width, trained=True)

    def predictions(self, batch: HeadBatch, depths: Sequence[int]) -> Iterator[Prediction]:
        exits = batch.features[self.captured_layers[0]].to(self.dtype)
        positions = torch.arange(exits.shape[1], device=exits.device)[None]
        states = self.adapter(exits, positions, partial(causal_attention, window=self.window))
        for depth in depths:
            trained = trained_positions(batch.loss_mask, depth)
            yield Prediction(depth, trained, shift_left(states, depth)[trained])


@DRAFTERS.register("kangaroo")
class KangarooDrafter(AttendingDrafter):
    """Drafts with the target's first layers and the adapter, in any shape.

    A draft feeds the last token of the text, and then the nodes, to a view of the target that ends
    after `exit_layer`. The view reads the target's keys and values of the text, and its slots are
    restored after the draft. The adapter has a separate cache. Entry i of it holds the adapter's
    keys and values for token i. Those of the text are computed from the exit states of the
    target's passes. That of the last token comes from the view, and is computed again as soon as
    the target has read this token.

    Differs from the paper: the verification runs all layers over the draft. In the paper's code it
    starts from the exit states of the draft, so the first layers are not computed twice.
    """

    reads_cache = True
    heads: KangarooHeads
    _lm: CachedLM | None = None
    _view: LayerView | None = None

    def attach(self, lm: CachedLM) -> None:
        super().attach(lm)
        if self._lm is not lm:
            self._view, self._lm = lm.view(self.heads.skipped), lm
            self._view.capture(self.captured_layers)

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        if not limits.depths.any():
            return Draft.none(len(contexts.lengths), "cpu")
        room = self.max_nodes(limits.max_depth) + 1
        with self.view.slots.restored(contexts.lengths - 1, room):
            return super().draft(contexts, limits, sampling, rng)

    @property
    def view(self) -> LayerView:
        """The target's first layers."""
        assert self._view is not None, "attach() comes before draft()"
        return self._view

    def growth(self, contexts: Contexts, sampling: Sampling, max_depth: int) -> Growth:
        return _Growth(self, contexts, sampling)

    def layer(self, contexts: Contexts, columns: np.ndarray, states: Tensor) -> Tensor:
        attend = self.attention(columns[:, 0], columns.shape[1])
        outputs: Tensor = self.heads.adapter(states, to_device(columns, states.device), attend)
        return outputs

    def after_text(self, contexts: Contexts, exits: Tensor) -> Tensor:
        """[B, H]: the adapter's output for each row's last token, whose exit states are [B, H].
        Computes all missing entries too."""
        lengths = contexts.lengths
        self._keep(exits[:, None], lengths - 1, 0)
        outputs = self.newest(contexts, lengths)
        self.cached_entries = lengths - 1
        return outputs


class _Growth(CachedGrowth):
    """Feeds the last token of the text, and then the nodes, to the view, and its exit states to the
    adapter."""

    lm: LayerView
    reads_out = False  # the view's output layer, which is large, gets no tokens

    def __init__(self, drafter: KangarooDrafter, contexts: Contexts, sampling: Sampling) -> None:
        super().__init__(
            drafter.view,
            contexts.lengths,
            contexts,
            sampling,
            drafter.vocab_size,
            drafter.heads.vocabulary,
        )
        self.drafter, self.heads = drafter, drafter.heads
        exits = self._exits(contexts.last_tokens(self.device), -1, None)
        self.states = drafter.after_text(contexts, exits[:, 0])
        self.first_B1 = to_device(self.lengths, self.device)[:, None]

    def _first(self) -> Tensor:
        return self.heads.output.at(1, self.states)

    def feed(
        self, ids: Tensor, before: int, seen: Tensor | None, counts: np.ndarray | None = None
    ) -> Tensor:
        exits = self._exits(ids, before, seen, counts)
        count = ids.shape[1]
        if seen is None:
            attend = self.drafter.attention(self.lengths + before, count)
            positions = self.first_B1 + before + torch.arange(count, device=self.device)
        else:
            attend = self.drafter.attention(self.lengths + before, count, self.lengths, seen)
            positions = self.first_B1 + seen.sum(2) - 1
        return self.heads.output.at(1, self.heads.adapter(exits, positions, attend))

    def _exits(
        self, ids: Tensor, before: int, seen: Tensor | None, counts: np.ndarray | None = None
    ) -> Tensor:
        """[B, n, H]: the exit states of these tokens."""
        super().feed(ids, before, seen, counts)
        (layer,) = self.drafter.captured_layers
        return self.lm.features[layer].to(self.drafter.states.dtype)
