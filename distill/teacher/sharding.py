"""Shards a frozen model over the ranks: each rank holds a part of every layer."""

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from decode.errors import UserError


def shard_layers(stack: nn.Module, device_type: str) -> None:
    """Shard the decoder layers of a frozen stack over all ranks, in place (FSDP2).

    Embeddings and final norm are not sharded. A layer is gathered only while it runs, so every rank
    must run it the same number of times. Raises UserError if there is only one process
    (torch.distributed is not initialised), or if the stack has no single list of layers.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise UserError(
            "a teacher can be sharded over several processes only; start them with "
            "`accelerate launch`, or leave shard_teacher off"
        )
    lists = {name: m for name, m in stack.named_children() if isinstance(m, nn.ModuleList)}
    if len(lists) != 1:
        raise UserError(f"{type(stack).__name__} has no single list of layers to shard")
    (name, layers), *_ = lists.items()
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    whole = {p for own, p in stack.named_parameters() if not own.startswith(f"{name}.")}
    fully_shard(stack, mesh=mesh, ignored_params=whole)
