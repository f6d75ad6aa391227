"""Weights in the layout that a CPU's matrix kernels want, for models that only decode.

A decode step multiplies a few rows by every weight of the model. PyTorch's CPU kernels bring each
weight into their own layout first, again at every call, which for so few rows costs more than the
product. Done once, it makes the step of a small model a third to a half shorter, and the results
are those of the same kernels.
"""

import copy
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import psutil
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from decode.target import attention
from decode.target.placement import is_hooked

_SUPPORTED: dict[torch.dtype, Callable[[], bool]] = {
    torch.float32: lambda: True,
    torch.bfloat16: lambda: bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    torch.float16: lambda: bool(torch.ops.mkldnn._is_mkldnn_fp16_supported()),
}


class PackedLinear(nn.Module):
    """x ↦ x·Wᵀ + b, as the layer it is made from, whose parameters it shares."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear | Conv1D) -> None:
        super().__init__()
        self.transposed = isinstance(layer, Conv1D)
        self.weight, self.bias = layer.weight, layer.bias
        self._made_of: tuple[int, int] | None = None
        self.refresh()

    def refresh(self) -> None:
        """Pack again if the weight has changed since."""
        # What was made in inference mode is not counted, and is not trained either.
        version = 0 if self.weight.is_inference() else self.weight._version
        state = (self.weight.data_ptr(), version)
        if state != self._made_of:
            weight = self.weight.detach()
            weight = weight.t().contiguous() if self.transposed else weight
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
            self._made_of = state

    def forward(self, x: Tensor) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self.bias, "none", [], ""
        )
        return packed


class PackedModel:
    """A model whose linear layers are packed; the model it is made from stays as it is.

    It shares every parameter and buffer with that model and takes about as much memory again.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        shared: dict[int, Any] = {
            id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]
        }
        self.model = copy.deepcopy(model, shared)
        self._layers = pack_layers(self.model)

    def refresh(self) -> None:
        """Follow weights that were changed in place, as by an optimizer."""
        for layer in self._layers:
            layer.refresh()


class PreparedModel:
    """A model as the loop runs it: packed where this machine can, else the model itself.

    model: what to run. row_exact: the packed copy attends with `decode.target.attention`, so that a
    chain may be fed with `each_token_alone`, over keys padded to a multiple of its `SLOTS`.
    """

    def __init__(self, model: PreTrainedModel, packed: PackedModel | None) -> None:
        self._packed = packed
        self.model: PreTrainedModel = packed.model if packed else model
        self.row_exact = self.model.config._attn_implementation == attention.NAME

    def refresh(self) -> None:
        """Follow weights that were changed in place, as by an optimizer."""
        if self._packed:
            self._packed.refresh()


def prepare(model: PreTrainedModel) -> PreparedModel:
    """The prepared form of a model. It is made once and shared by all who decode with the model, as
    long as the model lives: packing takes time and memory, and two decoders can be compared only
    if both run on the same kernels. It is made again for a model that was rebuilt in the meantime,
    as by an adapter or another output layer."""
    state = (
        # The packed copy keeps the parameters alive, so that no other can get the id of one.
        tuple(id(parameter) for parameter in model.parameters()),
        tuple(ref(module) for module in model.modules()),
        model.config._attn_implementation,
        is_hooked(model),
    )
    if model not in _PREPARED or _PREPARED[model][0] != state:
        packed = None
        if can_pack(model):
            packed = PackedModel(model)
            attention.use_own_attention(packed.model)
        _PREPARED[model] = state, packed
    return PreparedModel(model, _PREPARED[model][1])


# The packed copy must not refer to the model, or neither would ever be freed.
_PREPARED: WeakKeyDictionary[nn.Module, tuple[Any, PackedModel | None]] = WeakKeyDictionary()


def pack_layers(module: nn.Module) -> list[PackedLinear]:
    """Put packed layers in the place of a module's linear ones; those layers."""
    packed = []
    for part in list(module.modules()):
        for name, child in part.named_children():
            if type(child) in (nn.Linear, Conv1D):
                packed.append(PackedLinear(child))
                setattr(part, name, packed[-1])
    return packed


def can_pack(model: nn.Module) -> bool:
    """Whether packing is possible, and worth its memory: it shall not take more than half of what
    is free. Models that other libraries have wrapped, sharded or quantised stay as they are."""
    if not torch.backends.mkldnn.is_available():
        return False
    parameters = list(model.parameters())
    plain = all(type(p) is nn.Parameter and p.device.type == "cpu" for p in parameters)
    if not plain or not all(p.dtype in _SUPPORTED and _SUPPORTED[p.dtype]() for p in parameters):
        return False
    if is_hooked(model) or getattr(model, "is_quantized", False):
        return False
    return 2 * sum(p.nbytes for p in parameters) < psutil.virtual_memory().available
