"""The optimizer of every training stage: parameter groups, learning rate schedule, EMA."""

from fnmatch import fnmatchcase

import torch
from torch import nn

from decode.base.errors import UserError
from train.settings.optimizer_config import GroupConfig, OptimizerConfig


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
