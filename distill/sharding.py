"""A frozen model shared out over the ranks, each holding a part of every layer."""

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from decode.errors import UserError


def shard_layers(stack: nn.Module) -> None:
    """Shard each decoder layer of a frozen stack over all ranks, in place (FSDP2).

    A layer is whole only while it runs, so every rank must run it the same number of times.
    Raises UserError when there is one process only, or no list of layers.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise UserError(
            "a teacher can be sharded over several processes only; start them with "
            "`accelerate launch`, or leave shard_teacher off"
        )
    lists = [child for child in stack.children() if isinstance(child, nn.ModuleList)]
    if len(lists) != 1:
        raise UserError(f"{type(stack).__name__} has no single list of layers to shard")
    for layer in lists[0]:
        fully_shard(layer)
