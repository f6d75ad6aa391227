"""What makes decoding fast on a CPU: packed matrix products, attention, and lean decoder layers.

`PackedLinear` keeps weights in the layout of PyTorch's CPU kernels.

The attention replaces transformers' `sdpa`. It copies no keys and values: the query heads that
share a key head are rows of one query. For chains, a token also gets the same bits for any number
of tokens fed with it.

`LeanLayer` replaces a layer of the llama kind (llama, mistral, qwen2, qwen3). It computes the same
with fewer and larger operations: one product for queries, keys and values, the activation and the
sums inside of products, one operation for a norm. `decode.target.prepare_model` decides which
layers it replaces.

Shapes of attention: B rows, n tokens fed per row, H query heads, K key heads, G = H / K, S slots,
D head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.pytorch_utils import Conv1D

ATTENTION = "draftsmith"

# Keys are padded to a multiple of this many slots. The kernel sums the slots one vector width at a
# time. With this padding, masked slots at the end do not change any partial sum.
SLOT_STEP = 16

# Arguments that some models pass in addition to the mask; `attention_forward` does not take them.
LEFT_TO_TRANSFORMERS = ("position_bias", "softcap", "s_aux", "cache")

# Nobody drafts longer chains, and more tokens one by one would take long.
LONGEST_CHAIN = 32


class PackedLinear(nn.Module):
    """x ↦ x·Wᵀ + b, a replacement for a linear layer, or for several with the same input: their
    outputs follow each other. It shares the parameters of those layers."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, *layers: nn.Linear | Conv1D) -> None:
        super().__init__()
        self._layers = layers
        if len(layers) == 1:
            self.weight, self.bias = layers[0].weight, layers[0].bias
        self._packed_state: list[tuple[int, int]] = []
        self.refresh()

    def refresh(self) -> None:
        """Pack again if a weight has changed since the last packing."""
        # Tensors created in inference mode have no version counter. They are not trained either.
        state = [
            (x.data_ptr(), 0 if x.is_inference() else x._version)
            for layer in self._layers
            for x in (layer.weight, layer.bias)
            if x is not None
        ]
        if state == self._packed_state:
            return
        weights = [
            layer.weight.detach().t() if isinstance(layer, Conv1D) else layer.weight.detach()
            for layer in self._layers
        ]
        weight = weights[0].contiguous() if len(weights) == 1 else torch.cat(weights)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        biases = [layer.bias.detach() for layer in self._layers if layer.bias is not None]
        self._packed_bias = torch.cat(biases) if biases else None
        self._packed_state = state

    def forward(self, x: Tensor, activation: str = "none") -> Tensor:
        """activation: none, or swish (SiLU), computed before the result is rounded."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._packed_bias, activation, [], ""
        )
        return result

    def combined(self, x: Tensor, other: Tensor, operation: str) -> Tensor:
        """The product, added to `other` (add) or multiplied with it (mul) before rounding."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, other, self._packed, self._packed_bias, operation
        )
        return result


_each_token_alone: ContextVar[bool] = ContextVar("each_token_alone", default=False)


@contextmanager
def each_token_alone() -> Iterator[None]:
    """Inside this context, a token's attention has the same bits for any number of tokens fed with
    it.

    Holds for 16-bit weights, and keys padded to a multiple of `SLOT_STEP`.
    """
    token = _each_token_alone.set(True)
    try:
        yield
    finally:
        _each_token_alone.reset(token)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Same interface as transformers' attention functions: query [B, H, n, D], key and value
    [B, K, S, D], an additive mask [B, 1, n, S] or None; returns [B, n, H, D]. Cases that it does
    not support (no mask, a mask per head, a position bias) go to the function of transformers."""
    unsupported = any(kwargs.get(name) is not None for name in LEFT_TO_TRANSFORMERS)
    if attention_mask is None or attention_mask.shape[1] != 1 or unsupported:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    rows, heads, fed, _ = query.shape
    key_heads, slots = key.shape[1], key.shape[2]
    group = heads // key_heads
    query = query.unflatten(1, (key_heads, group))
    mask = attention_mask.expand(rows, 1, fed, slots)
    attend = torch.nn.functional.scaled_dot_product_attention
    if _each_token_alone.get():
        # The kernel sees n batches of one token each, so the products are the same for any n. Rows
        # and key heads are one dimension, so all n batches share the keys without a copy.
        query = query.permute(3, 0, 1, 2, 4).flatten(1, 2)  # [n, B·K, G, D]
        key, value = (
            x.flatten(0, 1).expand(fed, rows * key_heads, slots, x.shape[3]) for x in (key, value)
        )
        mask = mask.permute(2, 0, 1, 3)  # [n, B, 1, S]
        if rows > 1:
            mask = mask[:, :, None].expand(-1, -1, key_heads, -1, -1).flatten(1, 2)
        out = attend(query, key, value, attn_mask=mask, scale=scaling)
        out = out.unflatten(1, (rows, key_heads)).transpose(0, 1)  # [B, n, K, G, D]
        return out.reshape(rows, fed, heads, value.shape[3]), None
    mask = mask.repeat(1, 1, group, 1)
    out = attend(query.flatten(2, 3), key, value, attn_mask=mask, scale=scaling)
    out = out.unflatten(2, (group, fed)).permute(0, 3, 1, 2, 4)
    return out.reshape(rows, fed, heads, value.shape[3]), None


class LeanNorm(nn.Module):
    """RMS norm with a weight (1910.07467), in one operation."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LeanLayer(nn.Module):
    """Attention and a gated feed-forward network, each added to the residual stream."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.number, self.size, self.scaling = (
            attention.layer_idx,
            attention.head_dim,
            attention.scaling,
        )
        self.queries, self.keys = (
            linear.out_features // self.size for linear in (attention.q_proj, attention.k_proj)
        )
        self.qkv = PackedLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = PackedLinear(attention.o_proj)
        self.gate, self.up, self.down = (
            PackedLinear(linear) for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        )
        self.attention_norm = LeanNorm(layer.input_layernorm)
        self.mlp_norm = LeanNorm(layer.post_attention_layernorm)
        has_norms = hasattr(attention, "q_norm")
        self.query_norm = LeanNorm(attention.q_norm) if has_norms else None
        self.key_norm = LeanNorm(attention.k_norm) if has_norms else None
        self._attention = (attention,)  # not a part: transformers' attention reads its settings

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> Tensor:
        """[B, n, H] → [B, n, H], with the arguments of transformers' layers.

        attention_mask: an additive or boolean mask [B, 1, n, S], or None. position_embeddings: cos
        and sin, [B, n, D].
        """
        assert position_embeddings is not None
        heads = self.qkv(self.attention_norm(hidden_states)).unflatten(-1, (-1, self.size))
        rotating = heads[:, :, : self.queries + self.keys]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = rotating.split((self.queries, self.keys), 2)
            rotating = torch.cat([self.query_norm(query), self.key_norm(key)], 2)
        cos, sin = (x[:, :, None] for x in position_embeddings)
        first, second = rotating.chunk(2, -1)
        rotating = rotating * cos + torch.cat([-second, first], -1) * sin
        query, key = rotating.transpose(1, 2).split((self.queries, self.keys), 1)
        value = heads[:, :, self.queries + self.keys :].transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.number)
        (attention,) = self._attention
        outputs = attention_forward(
            attention, query, key, value, attention_mask, scaling=self.scaling
        )[0]
        hidden_states = self.out.combined(outputs.flatten(2), hidden_states, "add")
        normed = self.mlp_norm(hidden_states)
        gated = self.up.combined(normed, self.gate(normed, "swish"), "mul")
        return self.down.combined(gated, hidden_states, "add")


AttentionInterface.register(ATTENTION, attention_forward)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
