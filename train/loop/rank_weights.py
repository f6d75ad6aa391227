"""The weights of a module in an engine: the one door by which they leave a training.

DDP, FSDP2 and DeepSpeed keep them in different places, and a module that is compiled or that
recomputes its activations gives them other names. Whatever is decoded, compared, averaged or saved
reads them here, under the names of the module before `prepare`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from decode.base.errors import UserError


class RankWeights:
    """The weights of a module that an engine may shard, wrap or keep in another precision.

    module: before `parallel.prepare`, whose result `follow` takes. A tied parameter has its first
    name.
    """

    def __init__(self, accelerator: Accelerator, module: nn.Module) -> None:
        self.accelerator = accelerator
        named = dict(module.named_parameters())
        self.names = list(named)
        self.trained = [name for name, p in named.items() if p.requires_grad]
        self._frozen: dict[str, Tensor] = {}
        if self._deepspeed:
            # It may round frozen weights to the precision of the matrix products.
            frozen = named.keys() - set(self.trained)
            self._frozen = {name: named[name].detach().to("cpu", copy=True) for name in frozen}

    def follow(self, prepared: Any) -> None:
        """Take the weights from the module that the engine made of the first one.

        Raises UserError unless it trains exactly the weights that were trained before.
        """
        self.module = prepared
        count = sum(p.requires_grad for p in prepared.parameters())
        found = self._parameters().keys()
        lost = [name for name in self.names if name not in found]
        if lost or count != len(self.trained):
            raise UserError(
                f"the launched engine trains {count} weights, of which "
                f"{len(self.trained) - len(set(lost) & set(self.trained))} have a known name; "
                f"expected all {len(self.trained)}{f', such as {lost[0]}' if lost else ''}. They "
                "could not be saved. Launch without the settings of accelerate that wrap a model, "
                "such as dynamo_backend and fsdp_activation_checkpointing"
            )
        self._first = self._sums()

    def changed(self) -> bool:
        """Whether a trained weight of any rank has another value than at `follow`. Every rank must
        call this."""
        own = torch.tensor(float(self._sums() != self._first), device=self.accelerator.device)
        return bool(self.accelerator.reduce(own).item())

    def gathered(
        self, prefix: str = "", *, frozen: bool = True, everywhere: bool = True
    ) -> dict[str, Tensor]:
        """Complete copies of the weights, on the CPU. Every rank must call this.

        Only names that begin with `prefix` are included; the prefix is removed. Trained weights are
        float32, others as they were. frozen: include those that are not trained. everywhere: every
        rank gets them; otherwise the main process only, and the others get nothing.
        """
        wanted = everywhere or self.accelerator.is_main_process
        trained_names = set(self.trained)
        found: dict[str, Tensor] = {}
        for name, parameter in self._parameters().items():
            trained = name in trained_names
            if not name.startswith(prefix) or not (trained or frozen):
                continue
            if self._deepspeed and not trained:
                full = self._frozen[name]
            else:
                full = self._full(parameter).detach()
            if wanted:  # one at a time is complete on the others
                found[name.removeprefix(prefix)] = full.to("cpu", copy=True)
        return found

    def local(self) -> list[Tensor]:
        """This rank's shard of the trained float32 weights, as views: writing to them changes the
        weights.

        The engine sets the shapes and the order. They are the same at every call of one launch.
        Under DDP a shard is all the weights.
        """
        parameters = self._parameters()
        if not self._deepspeed:
            trained = [parameters[name] for name in self.trained]
            return [p.to_local() if isinstance(p, DTensor) else p for p in trained]
        if self.module.zero_optimization_partition_weights():
            from deepspeed.utils import safe_get_local_fp32_param

            return [safe_get_local_fp32_param(parameters[name]).detach() for name in self.trained]
        # With ZeRO-1 and ZeRO-2 each group has one tensor: this rank's part of its weights.
        groups = self.module.optimizer.param_groups
        return [flat.detach() for group in groups for flat in group["params"]]

    @contextmanager
    def exchanged(self, shards: Sequence[Tensor]) -> Iterator[None]:
        """Inside this context `gathered` returns `shards` instead of the trained weights. `shards`
        has the format of `local`.

        Under DeepSpeed the module's forward pass still uses the trained weights.
        """

        def swap() -> None:
            for weight, shard in zip(self.local(), shards, strict=True):
                trained = weight.clone()
                weight.copy_(shard)
                shard.copy_(trained)

        swap()
        try:
            yield
        finally:
            swap()

    def save_shards(self, shards: Sequence[Tensor], path: Path) -> None:
        """Write `shards`, which have the format of `local`. Every rank must call this.

        Under FSDP2 `path` becomes a directory that any number of ranks can read
        (torch.distributed.checkpoint). Otherwise a rank writes a file `<path>-<rank>.safetensors`;
        where every shard is all the weights, only the main process does.
        """
        if self.accelerator.is_fsdp2:
            dcp.save(self._by_name(shards), checkpoint_id=path)
        elif self._deepspeed or self.accelerator.is_main_process:
            file = _shard_file(path, self.accelerator.process_index)
            save_file({str(i): shard for i, shard in enumerate(shards)}, file)

    def load_shards(self, shards: Sequence[Tensor], path: Path) -> None:
        """Read into `shards` what `save_shards` wrote. Every rank must call this."""
        if path.is_dir():
            dcp.load(self._by_name(shards), checkpoint_id=path)
            return
        rank = self.accelerator.process_index if self._deepspeed else 0
        stored = load_file(_shard_file(path, rank))
        for i, shard in enumerate(shards):
            shard.copy_(stored[str(i)])

    @property
    def _deepspeed(self) -> bool:
        return self.accelerator.distributed_type == DistributedType.DEEPSPEED

    def _parameters(self) -> dict[str, Tensor]:
        """The weights by their first names, as the engine holds them; memory is shared."""
        if self._deepspeed:
            # Its own attributes are on the parameters. It compiles in place: names stay.
            found: dict[str, Any] = dict(self.module.module.named_parameters())
        else:
            # Names without the parts that wrappers add. Weights that a forward pass without
            # backward left gathered are sharded again.
            found = get_model_state_dict(self.module)
        return {name: found[name] for name in self.names if name in found}

    def _full(self, parameter: Tensor) -> Tensor:
        if self._deepspeed:
            from deepspeed.utils import safe_get_full_fp32_param

            return safe_get_full_fp32_param(parameter)
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    def _sums(self) -> list[int]:
        """The sum of the bits of each shard."""
        return [int(x.view(torch.int32).sum(dtype=torch.int64)) for x in self.local()]

    def _by_name(self, shards: Sequence[Tensor]) -> dict[str, Tensor]:
        """`shards` under FSDP2 as the sharded tensors that they are parts of. The memory is
        shared."""
        tensors: dict[str, Tensor] = {}
        parameters = self._parameters()
        for name, shard in zip(self.trained, shards, strict=True):
            weight = parameters[name]
            assert isinstance(weight, DTensor)
            tensors[name] = DTensor.from_local(
                shard,
                weight.device_mesh,
                weight.placements,
                run_check=False,
                shape=weight.shape,
                stride=weight.stride(),
            )
        return tensors


def _shard_file(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}-{rank}.safetensors")
