"""Causal attention of short texts on a CPU, in 16 bits.

Shapes: B rows, T tokens of a text, N heads, G key heads, D head size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

SHORT = 256  # tokens
# The scores of a layer that a training may keep for its backward pass.
MOST_SCORES = 1 << 22
# Arguments of `sdpa` that add to the scores or read other keys.
ADDED = "position_bias", "softcap", "s_aux", "cache"


def short_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[B, N, T, D] for queries [B, N, T, D], and keys and values [B, G, T, D]. All scores are in
    memory. The backward pass of flash attention takes three times as long there."""
    length, size = queries.shape[2:]
    # Each key head serves N/G query heads.
    grouped = (queries * size**-0.5).unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
    scores = (grouped @ keys.transpose(2, 3)).unflatten(2, (-1, length)).float()
    # Added, not filled in: the backward pass of a sum is free.
    weights = (scores + torch.full((length, length), -torch.inf).triu(1)).softmax(-1)
    outputs = weights.to(values.dtype).flatten(2, 3) @ values
    return outputs.unflatten(2, (-1, length)).flatten(1, 2)


def trained_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' function `sdpa`, with its interface, but in a training `short_attention` where
    that fits."""
    rows, heads, length, size = query.shape
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    fits = value.device.type == "cpu" and value.dtype.itemsize == 2 and length == key.shape[2]
    fits = fits and length <= SHORT and rows * heads * length**2 <= MOST_SCORES
    plain = causal and attention_mask is None and not dropout and scaling in (None, size**-0.5)
    if module.training and plain and fits and all(others.get(x) is None for x in ADDED):
        outputs = short_attention(query.to(value.dtype), key.to(value.dtype), value)
        return outputs.transpose(1, 2).contiguous(), None
    outputs, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout, scaling, is_causal, **others
    )
    return outputs, None
