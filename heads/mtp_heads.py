"""Heads of multi-token prediction (MTP): the modules that models ship in their checkpoints since
DeepSeek-V3 (2412.19437, section 2.2), and such modules trained for any target.

A step reads a hidden state and the embedding of the next token. It returns the next hidden state,
after a norm, and the target's output layer reads it. The first state is the target's, after its
final norm. A family has one layer, which runs once for each token of a draft (as FastMTP,
2509.18362, trains it), or one layer for each token.

Shapes: B rows, n tokens, T tokens of a text, H hidden size.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.model.cache.sliding_window import SlidingWindow
from decode.model.forward.attention_mask import Attend
from distill.flops import TextFlops, attention_flops, products_flops
from heads.autoregressive_heads import AutoregressiveHeads
from heads.heads_module import HEADS
from heads.layers.family_layer import FamilyRotary, family_layers, mtp_config, run_layer
from heads.layers.target_layers import copy_norm
from heads.layers.unrolled_attention import UnrolledAttention, causal_attention
from heads.options import MtpOptions


@HEADS.register("mtp")
class MtpHeads(AutoregressiveHeads):
    """Step d is `layers[d − 1]`, or the only layer, over the state of step d − 1 at the same place
    of the text and the embedding of the token d places later, at this token's position.

    The init weights are ours: the projection first copies the normed state, the decoder layer
    changes nothing, and the last norm gives the states their size back. So each step starts as the
    target's distribution one token earlier.
    """

    def __init__(
        self, options: MtpOptions, model: PreTrainedModel, vocabulary: Tensor | None = None
    ) -> None:
        options.require_window()
        super().__init__(options, options.depth, model, vocabulary)
        self.config = mtp_config(model, options.layers)
        self.layers = family_layers(model, self.config)
        self._rotary = FamilyRotary(model, self.config)
        self.attending_layers = self.stacked_layers = options.layers

    @property
    def window(self) -> SlidingWindow | None:
        """The option, or else that of the family's layers."""
        kinds = set(getattr(self.config, "layer_types", None) or ())
        if self.options.window is not None or kinds != {"sliding_attention"}:
            return super().window
        return SlidingWindow(self.config.sliding_window, 0)

    @torch.no_grad()
    def init_weights(self, model: PreTrainedModel) -> None:
        super().init_weights(model)
        for layer in self.layers:
            for part in layer.modules():
                model._init_weights(part)
            for name, weight in layer.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                    weight.zero_()
            parts: Any = layer
            parts.eh_proj.weight.zero_()
            own = slice(self.hidden_size, None)
            if getattr(self.config, "mtp_hidden_states_first", False):
                own = slice(0, self.hidden_size)
            parts.eh_proj.weight[:, own] = torch.eye(self.hidden_size)
            _fill(parts.enorm, 1.0)
            _fill(parts.hnorm, 1.0)
            final = nn.RMSNorm(self.hidden_size)
            copy_norm(final, model)
            _fill(parts.post_norm, float(final.weight.square().mean().sqrt()))

    def body_flops(self) -> TextFlops:
        """Each step goes through one layer, and there through some of its experts."""
        config = self.config
        per_token = self.depth * products_flops(self.layers[0], config=config)
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if getattr(config, "kv_lora_rank", None) is not None:
            head = config.qk_nope_head_dim + config.qk_rope_head_dim
        width = self.depth * config.num_attention_heads * head
        return TextFlops(per_token) + attention_flops(width, trained=True)

    def step(
        self,
        states: Tensor,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        read: Tensor | None = None,
        number: int = 0,
    ) -> Tensor:
        """The next states [B, n, H], of a layer.

        states: [B, n, H]. tokens: int64 [B, n], the tokens whose embeddings are read. positions:
        int64 [B, n] or [1, n], one less than those of these tokens. read: as in every step.
        """
        states, embedded = states.to(self.dtype), self.embeddings(tokens).to(self.dtype)
        at = positions + 1
        turns = self._rotary.in_layer(number, at, states)
        next_states = run_layer(self.layers[number], embedded, states, at, turns, attend)
        return next_states if read is None else next_states.flatten(0, 1)[read]

    def trained_step(
        self, depth: int, attention: UnrolledAttention
    ) -> tuple[Callable[..., Tensor], Attend]:
        if len(self.layers) == 1:
            return super().trained_step(depth, attention)
        # Each layer has keys and values for itself.
        attend = partial(causal_attention, window=self.window)
        return partial(self.step, number=depth - 1), attend


def _fill(norm: nn.Module, scale: float) -> None:
    """Make this the scale of a norm, also of one that adds 1 to its weight."""
    weight: Any = norm.weight
    weight.zero_()
    weight.fill_(scale - float(norm(torch.ones_like(weight)[None])[0, 0]))
