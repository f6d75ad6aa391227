"""The attention of `heads.layers.unrolled_attention.merged_attention` from all scores at once: what
it is compared with."""

from collections.abc import Sequence

import torch
from torch import Tensor

from decode.model.cache.sliding_window import SlidingWindow


def dense_attention(
    queries: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    window: SlidingWindow | None = None,
) -> Tensor:
    """As `merged_attention`, with T × T scores for each head."""
    length, size = queries.shape[2:]
    # Each key head serves N/G query heads: [B, G, N/G, T, D].
    grouped = queries.unflatten(1, (keys[0].shape[1], -1))
    text_scores = grouped @ keys[0][:, :, None].transpose(-1, -2)  # [B, G, N/G, T, T]
    hidden = torch.ones(length, length, dtype=torch.bool, device=queries.device).triu(1)
    if window is not None:
        positions = torch.arange(length, device=queries.device)
        hidden |= ~window.sees(positions[:, None] + len(keys) - 1, positions)
    text_scores = text_scores.masked_fill(hidden, -torch.inf)
    step_scores = [(grouped * key[:, :, None]).sum(-1, keepdim=True) for key in keys[1:]]
    scores = torch.cat([text_scores, *step_scores], -1) * size**-0.5  # [B, G, N/G, T, T + S]
    softmax_dtype = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=softmax_dtype).to(queries.dtype)
    outputs = weights[..., :length] @ values[0][:, :, None]
    for place, value in enumerate(values[1:], length):
        outputs = outputs + weights[..., place, None] * value[:, :, None]
    return outputs.flatten(1, 2)
