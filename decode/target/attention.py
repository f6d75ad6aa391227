"""Attention for decoding on a CPU, a replacement for transformers' `sdpa`.

It copies no keys and values: the query heads that share a key head are rows of one query. For
chains, a token also gets the same bits for any number of tokens fed with it.

Shapes: B rows, n tokens fed per row, H query heads, K key heads, G = H / K, S slots, D head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "draftsmith"

# Keys are padded to a multiple of this many slots. The kernel sums the slots one vector width at a
# time. With this padding, masked slots at the end do not change any partial sum.
SLOTS = 16

# Arguments that some models pass in addition to the mask. This file does not support them.
LEFT_TO_TRANSFORMERS = ("position_bias", "softcap", "s_aux", "cache")

# Nobody drafts longer chains, and more tokens one by one would take long.
LONGEST_CHAIN = 32

_each_token_alone: ContextVar[bool] = ContextVar("each_token_alone", default=False)


@contextmanager
def each_token_alone() -> Iterator[None]:
    """Inside this context, a token's attention has the same bits for any number of tokens fed with
    it.

    Holds for 16-bit weights, and keys padded to a multiple of `SLOTS`.
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
    others = any(kwargs.get(name) is not None for name in LEFT_TO_TRANSFORMERS)
    if attention_mask is None or attention_mask.shape[1] != 1 or others:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    rows, heads, fed, _ = query.shape
    shared, slots = key.shape[1], key.shape[2]
    group = heads // shared
    query = query.unflatten(1, (shared, group))
    mask = attention_mask.expand(rows, 1, fed, slots)
    attend = torch.nn.functional.scaled_dot_product_attention
    if _each_token_alone.get():
        # The kernel sees n batches of one token each, so the products are the same for any n. Rows
        # and key heads are one dimension, so all n batches share the keys without a copy.
        query = query.permute(3, 0, 1, 2, 4).flatten(1, 2)  # [n, B·K, G, D]
        key, value = (
            x.flatten(0, 1).expand(fed, rows * shared, slots, x.shape[3]) for x in (key, value)
        )
        mask = mask.permute(2, 0, 1, 3)  # [n, B, 1, S]
        if rows > 1:
            mask = mask[:, :, None].expand(-1, -1, shared, -1, -1).flatten(1, 2)
        out = attend(query, key, value, attn_mask=mask, scale=scaling)
        out = out.unflatten(1, (rows, shared)).transpose(0, 1)  # [B, n, K, G, D]
        return out.reshape(rows, fed, heads, value.shape[3]), None
    mask = mask.repeat(1, 1, group, 1)
    out = attend(query.flatten(2, 3), key, value, attn_mask=mask, scale=scaling)
    out = out.unflatten(2, (group, fed)).permute(0, 3, 1, 2, 4)
    return out.reshape(rows, fed, heads, value.shape[3]), None


def use_own_attention(model: PreTrainedModel) -> bool:
    """Make a model use this file's attention function. Returns False and changes nothing if the
    model does not call attention by name, or was loaded with another implementation than `sdpa`."""
    by_name = getattr(model, "_can_set_attn_implementation", lambda: False)
    if model.config._attn_implementation != "sdpa" or not by_name():
        return False
    model.set_attn_implementation(NAME)
    return True


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)
