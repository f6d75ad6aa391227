"""Hides the differences between DDP, FSDP2 and DeepSpeed from the training loop.

`accelerate launch` chooses the engine. Every engine averages the gradients over the ranks and clips
them by one global norm. The trained weights and AdamW's moments are float32.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel


def prepare(
    accelerator: Accelerator, module: nn.Module, optimizer: Optimizer, *, clip: float
) -> tuple[Any, Any]:
    """Pass module and optimizer to the engine. Use only the returned objects afterwards.

    The engine may shard `module` itself: reach its weights through `RankWeights` only.
    """
    # The loop divides by all tokens of a step; accelerate must not divide again.
    accelerator.gradient_accumulation_steps = 1
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        config = accelerator.deepspeed_plugin.deepspeed_config
        config |= {
            "train_micro_batch_size_per_gpu": 1,  # only used to count samples
            "gradient_accumulation_steps": 1,  # `part` marks the end of a step
            "gradient_clipping": clip,
        }
        if config.get("bf16", {}).get("enabled") is True:
            # Without this, ZeRO-2 takes steps whose gradient is not finite.
            config["bf16"]["check_grad_overflow"] = True
    elif accelerator.is_fsdp2:
        plugin = accelerator.state.fsdp_plugin
        names = _layer_names(module)
        plugin.transformer_cls_names_to_wrap = names
        plugin.auto_wrap_policy = functools.partial(
            transformer_auto_wrap_policy,
            transformer_layer_cls={type(m) for m in module.modules() if type(m).__name__ in names},
        )
        if accelerator.mixed_precision == "bf16":
            # accelerate would also average gradients and return the loss in bfloat16.
            plugin.mixed_precision_policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
    return accelerator.prepare(module, optimizer)


def place(accelerator: Accelerator, module: nn.Module) -> None:
    """Move a module that will be trained to the device, unless the engine moves its shards: a
    device may have no room for all of them."""
    if not accelerator.is_fsdp2:
        module.to(accelerator.device)


@contextmanager
def batch_context(accelerator: Accelerator, module: Any, *, last: bool) -> Iterator[None]:
    """The context for forward and `backward` of one batch. last: it is the step's last batch."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        module.set_gradient_accumulation_boundary(last)
        yield
    else:
        with nullcontext() if last else accelerator.no_sync(module):
            yield


def backward(accelerator: Accelerator, module: Any, loss: Tensor) -> None:
    """Add the gradients of the mean of `loss` over the ranks."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        # Not accelerator.backward: it would take the optimizer step at once.
        module.backward(loss)
    else:
        accelerator.backward(loss)


def clip_gradients(accelerator: Accelerator, module: Any, maximum: float) -> float:
    """Clip the gradients by their global norm. Returns the norm before clipping. Every rank must
    call this.

    DeepSpeed clips, takes the step if the norm is finite, and clears the gradients, all at once.
    The optimizer that `prepare` returned then does nothing.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        module.step()
        return float(module.get_global_grad_norm())
    norm = accelerator.clip_grad_norm_(module.parameters(), maximum)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _layer_names(module: nn.Module) -> list[str]:
    """The classes that the models' authors mark as not to be split: their decoder layers."""
    unsplit = {
        name
        for model in module.modules()
        if isinstance(model, PreTrainedModel)
        for name in model._no_split_modules or ()
    }
    return sorted(unsplit & {type(child).__name__ for child in module.modules()})
