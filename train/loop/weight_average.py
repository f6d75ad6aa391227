"""The EMA of the weights in training."""

from collections.abc import Sequence

import torch
from torch import Tensor


class EMA:
    """The EMA of the weights. shards: this rank's shards of the weights, in float32."""

    def __init__(self, shards: Sequence[Tensor], decay: float) -> None:
        self.decay = decay
        self.shards = [shard.clone() for shard in shards]

    @torch.no_grad()
    def update(self, shards: Sequence[Tensor], step: int) -> None:
        """Update after optimizer step `step` (from 1). Early steps use a smaller decay, so the
        untrained init weights fade out quickly."""
        decay = min(self.decay, step / (step + 10))
        for shard, new in zip(self.shards, shards, strict=True):
            shard.lerp_(new, 1 - decay)
