"""Checks whether a model has the weights that a drafter was made for, in any dtype.

A name or a hash of the files cannot tell. A model is the same from a hub, a directory and a GGUF
file, in float32 and in bfloat16. After a little training it is different under the same name.
"""

import torch
from torch import Tensor, nn

from decode.errors import UserError
from decode.target.placement import require_present, some_numbers

PER_TENSOR = 4


def sample_weights(model: nn.Module) -> Tensor:
    """float32 [m] on the CPU: a few numbers of every weight, in the order of the weights' names.
    Raises UserError for offloaded weights."""
    require_present(model, "a drafter made of heads on the target")
    weights = sorted(model.named_parameters(), key=lambda named: named[0])
    return torch.cat([some_numbers(weight, PER_TENSOR) for _, weight in weights])


def require_same_weights(found: Tensor, dtype: str, model: nn.Module, what: str) -> None:
    """Raises UserError unless `found`, a sample taken in `dtype` (such as bfloat16), matches the
    weights of `model` up to rounding. what: describes the expected target, for the message."""
    own = sample_weights(model)
    if len(own) != len(found):
        raise UserError(
            f"{what} is another model: its weights are {len(found) // PER_TENSOR} tensors or so, "
            f"those of the target in use {len(own) // PER_TENSOR}. Use the target it was made "
            "for, or make it again with this one"
        )
    eps = max(
        torch.finfo(getattr(torch, dtype)).eps,
        # Quantised weights may be integers, which are not rounded.
        max(torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point()),
    )
    # float16 cannot distinguish values below 1e-7 from 0.
    apart = (own - found).abs() > eps * torch.maximum(own.abs(), found.abs()) + 1e-7
    if apart.any():
        raise UserError(
            f"{what} has other weights than the target in use ({int(apart.sum())} of {len(own)} "
            "that were compared differ by more than rounding), so its hidden states mean "
            "something else. Use the target it was made for, or make it again with this one"
        )
