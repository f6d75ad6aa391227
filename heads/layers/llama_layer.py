"""A llama decoder layer, as engines serve it, whatever layers the target has.

It has the target's sizes, unless `LayerSettings` says otherwise. The caller chooses the attention.
In the decode loop it covers the text so far (`SlotAttention` of the lean forward). In
training it covers a text and the drafter's steps from each of its tokens
(`heads.layers.unrolled_attention`).

Shapes: B rows, n tokens, H hidden size, D head size, R width of the attention input.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from decode.model.forward.attention_mask import Attend
from decode.model.forward.layer_parts import LayerParts
from decode.model.forward.lean_layer import LeanLayer
from decode.model.forward.lean_parts import LeanNorm, PackedLayer
from decode.model.forward.prepare_model import refresh_packed
from decode.model.forward.rotations import Rotation, Rotations


class Rotary:
    """Computes cos and sin of positions, with a module of transformers: of this kind, for a config.

    It is not a module, because it has nothing to train, store or move. The first call on a device
    creates the module there, also for heads that start on `meta`.
    """

    def __init__(self, config: Any, kind: type[nn.Module] = LlamaRotaryEmbedding) -> None:
        self._config, self._kind = config, kind
        self._rotations: dict[torch.device, Rotations] = {}

    def __call__(self, positions: Tensor, like: Tensor, *kind: str) -> Rotation:
        """Return cos and sin, each [B, n, D] in the dtype of `like`, for positions int64 [B, n].
        kind: the type of layer, for a module that takes it."""
        device = positions.device
        if device not in self._rotations:
            with torch.inference_mode(False):
                self._rotations[device] = Rotations(self._kind(self._config).to(device))
        return self._rotations[device].of(positions, like, *kind)


class Attention(nn.Module):
    """Maps [B, n, R] to [B, n, H]."""

    def __init__(self, config: LlamaConfig, input_size: int) -> None:
        super().__init__()
        self.size = config.head_dim
        query_size, key_size = (
            count * config.head_dim
            for count in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q_proj = nn.Linear(input_size, query_size, bias=False)
        self.k_proj = nn.Linear(input_size, key_size, bias=False)
        self.v_proj = nn.Linear(input_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def mixed(self, x: Tensor, turns: Rotation, attend: Attend) -> Tensor:
        """The input of `o_proj`. turns: cos and sin of the tokens' positions."""
        queries, keys, values = (
            layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, *turns)
        return attend(queries, keys, values).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, turns: Rotation, attend: Attend) -> Tensor:
        outputs: Tensor = self.o_proj(self.mixed(x, turns, attend))
        return outputs


@torch.no_grad()
def init_layer(layer: Any, spread: float) -> None:
    """Set random init weights with standard deviation `spread`, and norms of 1.

    The two linear layers that write to the residual stream start as 0, so at first the layer
    changes nothing.
    """
    for part in layer.modules():
        if isinstance(part, nn.Linear):
            part.weight.normal_(std=spread)
        elif isinstance(part, LlamaRMSNorm):
            part.weight.fill_(1.0)
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()


class DraftLayer(PackedLayer):
    """Attention and a feed-forward network, each added to the residual stream.

    The layer does not norm the input of attention. The caller does, if needed.
    """

    def __init__(self, config: LlamaConfig, input_size: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, input_size)
        self.post_attention_layernorm: Any = LlamaRMSNorm(
            config.hidden_size, eps=config.rms_norm_eps
        )
        self.mlp = LlamaMLP(config)
        self._heads = config.num_attention_heads, config.num_key_value_heads
        # In a list, so that it is not a part: its weights are those of this layer.
        self._lean: list[LeanLayer] = []

    def make_lean(self) -> None:
        """From now on, run as the target's layers do: with packed products."""
        for name, norm in list(self.named_children()):
            if isinstance(norm, LlamaRMSNorm):
                setattr(self, name, LeanNorm(norm.weight, norm.variance_epsilon))
        attention, mlp = self.self_attn, self.mlp
        lean = LeanLayer(
            LayerParts(
                (attention.q_proj, attention.k_proj, attention.v_proj),
                attention.o_proj,
                (mlp.gate_proj, mlp.up_proj),
                mlp.down_proj,
                head_size=attention.size,
                query_heads=self._heads[0],
                key_heads=self._heads[1],
                activation=("swish", ""),
                mlp_in=self.post_attention_layernorm,
            )
        )
        self._lean = [lean]

    def refresh(self) -> None:
        for lean in self._lean:
            refresh_packed(lean)

    def forward(
        self,
        residual: Tensor,
        attention_input: Tensor,
        turns: Rotation,
        attend: Attend,
        read: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream [B, n, H]. attention_input: [B, n, R]. read: int64 [m],
        places of the flattened tokens, whose stream alone is returned; None: all."""
        if self._lean:
            outputs: Tensor = self._lean[0](residual, turns, attend, attention_input)
            return outputs if read is None else outputs.flatten(0, 1)[read]
        mixed = self.self_attn.mixed(attention_input, turns, attend)
        if read is not None:
            residual, mixed = (x.flatten(0, 1)[read] for x in (residual, mixed))
        residual = residual + self.self_attn.o_proj(mixed)
        update: Tensor = self.mlp(self.post_attention_layernorm(residual))
        return residual + update
