"""A target whose layers are sharded over all processes (FSDP2), for teacher passes.

No process ever holds all weights. Each one reads its shard of every layer from the safetensors
files. A layer is gathered only while it runs, so all processes must run the model the same number
of times, each on a batch of its own. Embeddings, final norm and output layer are complete on every
process, because drafters and losses read them directly.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from decode.base.errors import UserError
from decode.model.hidden_states import layer_list_name
from decode.model.pretrained import (
    LoadOptions,
    complete,
    config_and_tokenizer,
    from_pretrained,
    is_sharded,
    without_values,
)

# The setting that asks for `load_sharded`, for messages.
SETTING = "target.sharded"


def load_sharded(source: str, options: LoadOptions, **where: Any) -> tuple[Any, Any]:
    """Loads model and tokenizer as `from_pretrained` does, with the layers sharded over all
    processes. Every process must call this.

    Raises UserError if there is only one process (torch.distributed is not initialised), for a
    quantised checkpoint, and for a model without a single list of layers.
    """
    _require_processes(SETTING)
    trust = {"trust_remote_code": options.trust_remote_code}
    config, _ = config_and_tokenizer(source, **trust, **where)
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(
            f"{source} is quantised, and quantised weights cannot be sharded; turn {SETTING} off, "
            "or name a checkpoint that is not quantised"
        )
    attention = options.attn_implementation
    model = without_values(
        source,
        config,
        options.trust_remote_code,
        dtype=options.dtype,
        attn_implementation=None if attention == "auto" else attention,
    )
    model.eval().requires_grad_(False)
    stack = layer_list_name(model)
    if stack is None:
        raise UserError(
            f"{type(model).__name__} has no single list of layers to shard; turn {SETTING} off"
        )
    parent, _, name = stack.rpartition(".")
    sharded = replace(options, fsdp_plan={f"{name}.*": "free_full_weight"})
    loaded, tokenizer = from_pretrained(source, sharded, **where)
    _take_over(model, loaded, stack)
    shard_layers(model.get_submodule(parent), options.device.type, SETTING)
    return model, tokenizer


@torch.no_grad()
def _take_over(model: Any, loaded: Any, stack: str) -> None:
    """Move the sharded layers of `loaded` into `model`, a model of the same class on the device
    meta, and give it complete copies of the other weights.

    transformers shards all weights and runs only the model as one. Our passes also run the part
    below the output layer, and drafters read embeddings and output layer between passes.
    """
    loaded.requires_grad_(False)
    for key, tensor in [*loaded.named_parameters(), *loaded.named_buffers()]:
        if not key.startswith(f"{stack}."):
            parent, _, name = key.rpartition(".")
            if isinstance(tensor, nn.Parameter):
                tensor = nn.Parameter(complete(tensor), requires_grad=False)
            setattr(model.get_submodule(parent), name, tensor)
    parent, _, name = stack.rpartition(".")
    setattr(model.get_submodule(parent), name, loaded.get_submodule(stack))
    model.tie_weights()
    model.generation_config = loaded.generation_config
    # It would be copied into the configs of drafters.
    vars(model.config).pop("distributed_config", None)


def shard_layers(stack: nn.Module, device_type: str, setting: str) -> None:
    """Shard the decoder layers of a frozen stack over all ranks, in place (FSDP2).

    Embeddings and final norm are not sharded. A layer is gathered only while it runs, so every rank
    must run it the same number of times. Raises UserError if there is only one process
    (torch.distributed is not initialised), or if the stack has no single list of layers. setting:
    the setting that asks for this, for messages.
    """
    _require_processes(setting)
    lists = {name: m for name, m in stack.named_children() if isinstance(m, nn.ModuleList)}
    if len(lists) != 1:
        raise UserError(f"{type(stack).__name__} has no single list of layers to shard")
    (name, layers), *_ = lists.items()
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    for layer in layers:
        if not is_sharded(layer):
            fully_shard(layer, mesh=mesh)
    unsharded = {p for key, p in stack.named_parameters() if not key.startswith(f"{name}.")}
    fully_shard(stack, mesh=mesh, ignored_params=unsharded)


def _require_processes(setting: str) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise UserError(
            "a target can be sharded only over several processes; start them with "
            f"`accelerate launch`, or turn {setting} off"
        )
