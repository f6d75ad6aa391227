"""Hides the differences between DDP, FSDP2 and DeepSpeed from the training loop.

`accelerate launch` chooses the engine. Every engine averages the gradients over the ranks and clips
them by one global norm. The trained weights and AdamW's moments are float32.
"""

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedType,
    InitProcessGroupKwargs,
    disable_fsdp_ram_efficient_loading,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from decode.base.errors import UserError

# The variables that `accelerate launch` sets in every rank's environment, and their engines.
ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": DistributedType.DEEPSPEED,
    "ACCELERATE_USE_FSDP": DistributedType.FSDP,
    "ACCELERATE_USE_MEGATRON_LM": DistributedType.MEGATRON_LM,
}

# How long ranks wait for the main process while it evaluates drafters and writes reports.
PATIENCE = timedelta(hours=6)


def start(*, cpu: bool, **settings: Any) -> Accelerator:
    """An accelerator on the launched engine. `settings` are passed to Accelerator.

    cpu: do not use GPUs. Call this before any model is loaded: launching changes how transformers
    loads models, and this function undoes the change. Raises UserError for an engine that is not
    available.
    """
    launched = [
        kind for name, kind in ENGINES.items() if os.environ.get(name, "").lower() == "true"
    ]
    present = torch.accelerator.is_available()
    if not present:
        # accelerate imports DeepSpeed, which otherwise warns in every run that it found no GPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if launched and cpu and present:
        raise UserError(
            f"accelerate was launched with {launched[0].value}, but target.device is cpu on a "
            "machine with GPUs; set it to auto, or hide the GPUs (CUDA_VISIBLE_DEVICES=)"
        )
    fsdp1 = DistributedType.FSDP in launched and os.environ.get("FSDP_VERSION", "1") != "2"
    if fsdp1 or DistributedType.MEGATRON_LM in launched:
        raise UserError(
            f"accelerate was launched with {launched[0].value}; expected one process, MULTI_GPU, "
            "FSDP with fsdp_version 2, or DEEPSPEED, as in configs/accelerate"
        )
    if launched and not present and "LOCAL_RANK" in os.environ:
        # On a CPU accelerate would silently use DDP instead (if told to use the CPU), or run every
        # rank as if it were alone (if not told).
        os.environ.pop("ACCELERATE_USE_CPU", None)
        state = PartialState(backend="gloo", timeout=PATIENCE)
        if launched[0] == DistributedType.FSDP:
            state.distributed_type = DistributedType.MULTI_GPU
        cpu = False
    else:
        cpu = cpu or not present
    waiting = InitProcessGroupKwargs(timeout=PATIENCE)
    accelerator = Accelerator(cpu=cpu, kwargs_handlers=[waiting], **settings)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != world:
        raise UserError(
            f"WORLD_SIZE is {world}, but accelerate has another number of ranks; start the ranks "
            "with accelerate launch"
        )
    if launched and accelerator.distributed_type != launched[0]:
        raise UserError(
            f"accelerate was launched with {launched[0].value}, but it runs "
            f"{accelerator.distributed_type.value}; check the accelerate config and the device"
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        # ZeRO-3 would shard every model that transformers loads, even the target: accelerate
        # registers its config in transformers regardless of zero3_init_flag.
        unset_hf_deepspeed_config()
        if "optimizer" in accelerator.deepspeed_plugin.deepspeed_config:
            raise UserError(
                "the DeepSpeed config sets an optimizer; remove it, because stages make their own"
            )
    elif accelerator.is_fsdp2:
        # This option would leave models empty on all ranks but one.
        accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = False
        disable_fsdp_ram_efficient_loading()
    return accelerator


def prepare(
    accelerator: Accelerator, module: nn.Module, optimizer: Optimizer, *, clip: float
) -> tuple[Any, Any]:
    """Pass module and optimizer to the engine. Use only the returned objects afterwards.

    The engine may shard `module` itself. Copy it before if you need the complete module later.
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


@contextmanager
def part(accelerator: Accelerator, module: Any, *, last: bool) -> Iterator[None]:
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


def gathered_weights(accelerator: Accelerator, module: Any, prefix: str = "") -> dict[str, Tensor]:
    """Complete float32 copies of the trained parameters, on the CPU of every rank.

    Only names that begin with `prefix` are included; the prefix is removed. Names are those of
    `module` before `prepare`; a tied parameter has its first name. To get the current model, load
    them (strict=False) into a copy made before `prepare`. Every rank must call this.
    """
    return {
        name.removeprefix(prefix): _full(accelerator, parameter).detach().to("cpu", copy=True)
        for name, parameter in _trained(accelerator, module)
        if name.startswith(prefix)
    }


def local_weights(accelerator: Accelerator, module: Any) -> list[Tensor]:
    """This rank's share of the trained float32 weights, as views: writing to them changes the
    weights.

    The engine sets the shapes and the order. They are the same at every call of one launch. Under
    DDP a share is all the weights.
    """
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return [
            p.to_local().detach() if isinstance(p, DTensor) else p.detach()
            for _, p in _trained(accelerator, module)
        ]
    if module.zero_optimization_partition_weights():
        from deepspeed.utils import safe_get_local_fp32_param

        return [safe_get_local_fp32_param(p).detach() for _, p in _trained(accelerator, module)]
    return [flat.detach() for flat in module.optimizer.single_partition_of_fp32_groups]


@contextmanager
def exchanged(accelerator: Accelerator, module: Any, shares: Sequence[Tensor]) -> Iterator[None]:
    """Inside this context `gathered_weights` returns `shares` instead of the weights. `shares` has
    the format of `local_weights`.

    Under DeepSpeed the module's forward pass still uses the trained weights.
    """

    def swap() -> None:
        for weight, share in zip(local_weights(accelerator, module), shares, strict=True):
            trained = weight.clone()
            weight.copy_(share)
            share.copy_(trained)

    swap()
    try:
        yield
    finally:
        swap()


def save_shares(
    accelerator: Accelerator, module: Any, shares: Sequence[Tensor], path: Path
) -> None:
    """Write `shares`, which have the format of `local_weights`. Every rank must call this.

    Under FSDP2 `path` becomes a directory that any number of ranks can read
    (torch.distributed.checkpoint). Otherwise each rank writes a file `<path>-<rank>.safetensors`.
    """
    if accelerator.is_fsdp2:
        dcp.save(_by_name(accelerator, module, shares), checkpoint_id=path)
    else:
        file = _share_file(path, accelerator.process_index)
        save_file({str(i): share for i, share in enumerate(shares)}, file)


def load_shares(
    accelerator: Accelerator, module: Any, shares: Sequence[Tensor], path: Path
) -> None:
    """Read into `shares` what `save_shares` wrote. Every rank must call this."""
    if path.is_dir():
        dcp.load(_by_name(accelerator, module, shares), checkpoint_id=path)
        return
    file = _share_file(path, accelerator.process_index)
    # Without a file for this rank, every share is all the weights (`Checkpoints.load`), so rank 0's
    # share fits.
    stored = load_file(file if file.exists() else _share_file(path, 0))
    for i, share in enumerate(shares):
        share.copy_(stored[str(i)])


def _share_file(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}-{rank}.safetensors")


def _by_name(accelerator: Accelerator, module: Any, shares: Sequence[Tensor]) -> dict[str, Tensor]:
    """`shares` under FSDP2 as the sharded tensors that they are parts of. The memory is shared."""
    tensors: dict[str, Tensor] = {}
    for (name, weight), share in zip(_trained(accelerator, module), shares, strict=True):
        assert isinstance(weight, DTensor)
        tensors[name] = DTensor.from_local(
            share,
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )
    return tensors


def _trained(accelerator: Accelerator, module: Any) -> list[tuple[str, nn.Parameter]]:
    plain = accelerator.unwrap_model(module)
    for part in plain.modules():
        # After a forward pass without backward, some parameters are still gathered, in the
        # precision of the matrix products.
        if isinstance(part, FSDPModule):
            part.reshard()
    return [(name, p) for name, p in plain.named_parameters() if p.requires_grad]


def _full(accelerator: Accelerator, parameter: Tensor) -> Tensor:
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(parameter)
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _layer_names(module: nn.Module) -> list[str]:
    """The classes that the models' authors mark as not to be split: their decoder layers."""
    unsplit = {
        name
        for model in module.modules()
        if isinstance(model, PreTrainedModel)
        for name in model._no_split_modules or ()
    }
    return sorted(unsplit & {type(child).__name__ for child in module.modules()})
