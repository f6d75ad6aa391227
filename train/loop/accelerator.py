"""Starts accelerate on the engine that it was launched with."""

import os
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedType,
    DynamoBackend,
    InitProcessGroupKwargs,
    disable_fsdp_ram_efficient_loading,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from decode.base.device import dtype_name
from decode.base.errors import UserError
from train.measure.machine import has_fast_products

# The variables that `accelerate launch` sets in every rank's environment, and their engines.
ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": DistributedType.DEEPSPEED,
    "ACCELERATE_USE_FSDP": DistributedType.FSDP,
    "ACCELERATE_USE_MEGATRON_LM": DistributedType.MEGATRON_LM,
}


# How long ranks wait for the main process while it evaluates drafters and writes reports.
PATIENCE = timedelta(hours=6)


def launched_accelerator(*, cpu: bool, **settings: Any) -> Accelerator:
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
        dynamo, stage = accelerator.state.dynamo_plugin, accelerator.deepspeed_plugin.zero_stage
        whole = dynamo.backend != DynamoBackend.NO and not dynamo.use_regional_compilation
        if stage == 3 and whole:
            # It traces products with the weights of other ranks, which are empty between two uses.
            raise UserError(
                f"accelerate was launched with DeepSpeed's ZeRO-3 and dynamo_backend "
                f"{dynamo.backend.value.lower()}; expected one of the two: leave dynamo_backend "
                "out, or use ZeRO-2, FSDP 2 or DDP"
            )
    elif accelerator.is_fsdp2:
        # This option would leave models empty on all ranks but one.
        accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = False
        disable_fsdp_ram_efficient_loading()
    return accelerator


def precision_in_words(device: torch.device, mixed_precision: str, target: torch.dtype) -> str:
    """In what matrix products are computed on this device. mixed_precision: accelerate's name of
    the trainings' precision. target: the dtype of the target's weights."""
    if mixed_precision == "bf16":
        trainings = "bfloat16 (autocast; the weights stay float32)"
    elif device.type != "cuda":
        trainings = "float32"
    else:
        # PyTorch's default is "highest". A launcher with dynamo, and the environment, change it.
        exact = torch.get_float32_matmul_precision() == "highest"
        trainings = f"float32 {'without' if exact else 'with'} TF32"
        if has_fast_products(device, torch.bfloat16):
            trainings += " (precision: bf16 takes less time here)"
    passes = dtype_name(target)
    return f"products on {device.type}: trainings in {trainings}; the target's passes in {passes}"
