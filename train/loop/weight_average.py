"""The EMA of the weights in training."""

from collections.abc import Sequence

import torch
from torch import Tensor


class EMA:
    """The EMA of the weights. shares: this rank's shares of the weights, in float32."""

    def __init__(self, shares: Sequence[Tensor], decay: float) -> None:
        self.decay = decay
        self.shares = [share.clone() for share in shares]

    @torch.no_grad()
    def update(self, shares: Sequence[Tensor], step: int) -> None:
        """Update after optimizer step `step` (from 1). Early steps use a smaller decay, so the
        untrained init weights fade out quickly."""
        decay = min(self.decay, step / (step + 10))
        for share, new in zip(self.shares, shares, strict=True):
            share.lerp_(new, 1 - decay)
