"""Modules that `torch.compile` wraps."""

from torch import nn


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` wraps, or the module itself. accelerate wraps single layers
    under use_regional_compilation."""
    return getattr(module, "_orig_mod", module)
