"""The trained weights of an engine: complete copies, and the share of one rank.

DDP, FSDP2 and DeepSpeed keep them in different places.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


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
