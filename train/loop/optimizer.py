"""The optimizer of every training stage: parameter groups, learning rate schedule, EMA."""

from fnmatch import fnmatchcase
from typing import Literal

import torch
from pydantic import Field
from torch import nn

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
    warmup_ratio: float | None = Field(None, gt=0, lt=1)
    """The warm-up as a share of a training's steps, in place of `warmup_steps`."""
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

    def warm_up(self, total: int) -> int:
        """The steps of the warm-up of a training of `total` steps."""
        return self.warmup_steps if self.warmup_ratio is None else int(self.warmup_ratio * total)


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
    # Fused: one pass over the weights. On a CPU these passes are most of its cost.
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True)


def grouped_names(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names and shapes of the parameters of each group, in the optimizer's order."""
    names = {id(p): f"{name} {list(p.shape)}" for name, p in module.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
