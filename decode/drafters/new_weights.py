"""Replaces weights of a drafter's module: all of the given ones, or none if one does not fit."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from decode.errors import UserError
from decode.target.cpu_kernels import PackedLinear


def require_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raises UserError unless the module has parameters with these names and shapes."""
    own = dict(module.named_parameters())
    for name, tensor in weights.items():
        if name not in own or own[name].shape != tensor.shape:
            found = f"one of shape {tuple(own[name].shape)}" if name in own else "none"
            raise UserError(
                f"new weights bring {name} of shape {tuple(tensor.shape)} and the drafter "
                f"{type(module).__name__} has {found}; use weights of the same model"
            )


@torch.no_grad()
def take_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copies the values in, converted to the module's dtype and device, and repacks packed layers.
    Raises UserError as `require_weights` does, and then changes nothing."""
    require_weights(module, weights)
    own = dict(module.named_parameters())
    for name, tensor in weights.items():
        own[name].copy_(tensor)
    for part in module.modules():
        if isinstance(part, PackedLinear):
            part.refresh()
