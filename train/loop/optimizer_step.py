"""An optimizer step: the learning rate at each step, and clipping."""

import math
from collections.abc import Callable

import torch

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
