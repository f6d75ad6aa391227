"""An optimizer step: the learning rate at each step, clipping, and the EMA of the weights."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from train.settings.optimizer_config import OptimizerConfig


def learning_rate_factor(
    step: int, total: int, config: OptimizerConfig, time_share: float = 0.0
) -> float:
    """The factor of the learning rate at a step: linear warm-up, then the schedule over the steps,
    or over a limited time if a greater share of that is over."""
    warm_up = config.warm_up(total)
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, total - warm_up)
    done = min(1.0, max(done, time_share))
    shape = {
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "linear": 1 - done,
        "constant": 1.0,
    }[config.schedule]
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape


def take_step(
    optimizer: torch.optim.Optimizer,
    config: OptimizerConfig,
    *,
    step: int,
    total: int,
    time_share: float = 0.0,
    clip: Callable[[float], float],
) -> tuple[float, float]:
    """Take one optimizer step and clear the gradients. Returns the gradient's norm before clipping
    and the learning rate.

    step: from 0; the learning rate is a pure function of it and of the time that is over, so there
    is no scheduler state to lose. total: the number of steps of the training. clip(maximum): clips
    the gradients by their global norm and returns the norm before clipping. A step whose norm is
    not finite is not taken.
    """
    factor = learning_rate_factor(step, total, config, time_share)
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor
    norm = clip(config.clip)
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
    return norm, config.lr * factor


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
