"""The optimizer of every training stage: parameter groups, learning rate schedule, EMA."""

import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from decode.base.errors import UserError
from decode.base.strict import Strict


class GroupConfig(Strict):
    """Settings of the parameters whose dotted names match a pattern."""

    lr: float | None = Field(None, gt=0)
    """Their learning rate. None: `optimizer.lr`."""
    weight_decay: float | None = Field(None, ge=0)
    """Their weight decay. None: `optimizer.weight_decay`."""


class OptimizerConfig(Strict):
    """AdamW. The learning rate is warmed up linearly, then lowered by a schedule."""

    lr: float = Field(3e-4, gt=0)
    """The learning rate after the warm-up."""
    weight_decay: float = Field(0.0, ge=0)
    """The decoupled weight decay of AdamW (1711.05101). It also holds for norms and biases, which
    Hugging Face's Trainer leaves out; `groups` with `*norm*` and `*bias` does the same here."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """The decay of the mean of the gradients."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """The decay of the mean of the squared gradients."""
    clip: float = Field(1.0, gt=0)
    """The maximum norm of a step's gradient. A larger gradient is scaled down."""
    warmup_steps: int = Field(10, ge=0)
    """Optimizer steps until the learning rate reaches `lr`."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""
    min_lr_ratio: float = Field(0.02, ge=0, le=1)
    """The learning rate at the end of the schedule, as a share of `lr`."""
    groups: dict[str, GroupConfig] = {}
    """{pattern: settings}, with patterns such as `*embed_tokens*`. The first match counts."""
    ema: float | None = Field(None, gt=0, lt=1)
    """The decay, such as 0.999, of an exponential moving average (EMA) of the weights. The averaged
    weights are then evaluated and saved. None: the last weights are evaluated and saved. Under
    DeepSpeed the forward pass has only the last weights, so figures on a dev slice use these."""


def make_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW over the trained parameters. Each group stores its learning rate as `base_lr`.

    Raises UserError if nothing is trained, or if a group's pattern matches no trained parameter.
    """
    members: dict[str | None, list[nn.Parameter]] = {name: [] for name in [*config.groups, None]}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            match = next((g for g in config.groups if fnmatchcase(name, g)), None)
            members[match].append(parameter)
    if not any(members.values()):
        raise UserError("no parameter is trained; expected at least one that is not frozen")
    groups = []
    for pattern, parameters in members.items():
        group = config.groups[pattern] if pattern is not None else GroupConfig()
        if not parameters:
            if pattern is None:
                continue
            trained = [name for name, p in module.named_parameters() if p.requires_grad]
            raise UserError(
                f"optimizer.groups: {pattern!r} matches no trained parameter; expected a pattern "
                f"for names such as {', '.join(trained[:3])}"
            )
        lr = config.lr if group.lr is None else group.lr
        decay = config.weight_decay if group.weight_decay is None else group.weight_decay
        groups.append({"params": parameters, "lr": lr, "base_lr": lr, "weight_decay": decay})
    # Fused: AdamW makes one pass over the weights. On a CPU these passes are most of its cost.
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


def learning_rate_factor(
    step: int, total: int, config: OptimizerConfig, time_share: float = 0.0
) -> float:
    """The factor of the learning rate at a step: linear warm-up, then the schedule over the steps,
    or over a limited time if a greater share of that is over."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, total - config.warmup_steps)
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
        torch._foreach_lerp_(self.shares, list(shares), 1 - decay)
