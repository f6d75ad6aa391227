"""Packs weights into the layout of the CPU's matrix kernels, for models that only decode.

A decode step multiplies a few rows by every weight of the model. On every call, PyTorch's CPU
kernels first convert each weight to their layout. For so few rows, that costs more than the
product. Converting once makes a step of a small model a third to a half shorter. The results come
from the same kernels.
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
from decode.target.pretrained import is_hooked

_SUPPORTED: dict[torch.dtype, Callable[[], bool]] = {
    torch.float32: lambda: True,
    torch.bfloat16: lambda: bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    torch.float16: lambda: bool(torch.ops.mkldnn._is_mkldnn_fp16_supported()),
}


class PackedLinear(nn.Module):
    """x ↦ x·Wᵀ + b, a replacement for a linear layer. It shares the parameters of that layer."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear | Conv1D) -> None:
        super().__init__()
        self.transposed = isinstance(layer, Conv1D)
        self.weight, self.bias = layer.weight, layer.bias
        self._made_of: tuple[int, int] | None = None
        self.refresh()

    def refresh(self) -> None:
        """Pack again if the weight has changed since the last packing."""
        # Tensors created in inference mode have no version counter. They are not trained either.
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
    """A copy of a model with packed linear layers. The original model is not changed.

    The copy shares every parameter and buffer with the original, and its packed weights take about
    the same memory again.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        shared: dict[int, Any] = {
            id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]
        }
        self.model = copy.deepcopy(model, shared)
        self._layers = pack_layers(self.model)

    def refresh(self) -> None:
        """Use weights that were changed in place, for example by an optimizer."""
        for layer in self._layers:
            layer.refresh()


class PreparedModel:
    """A model as the loop runs it: a packed copy if possible, else the model itself.

    model: the model to run. row_exact: the packed copy uses `decode.target.attention`. Then a chain
    may be fed with `each_token_alone`, over keys padded to a multiple of its `SLOTS`.
    """

    def __init__(self, model: PreTrainedModel, packed: PackedModel | None) -> None:
        self._packed = packed
        self.model: PreTrainedModel = packed.model if packed else model
        self.row_exact = self.model.config._attn_implementation == attention.NAME

    def refresh(self) -> None:
        """Use weights that were changed in place, for example by an optimizer."""
        if self._packed:
            self._packed.refresh()


def prepare(model: PreTrainedModel) -> PreparedModel:
    """The prepared form of a model. It is created once, and all decoders of the model share it
    while the model exists: packing takes time and memory, and two decoders can be compared only if
    both run on the same kernels. It is created again if the model was rebuilt, for example with an
    adapter or another output layer."""
    state = (
        # The packed copy keeps the parameters alive, so no other object can get one of these ids.
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


# The packed copy must not refer to the model. Otherwise neither would ever be freed.
_PREPARED: WeakKeyDictionary[nn.Module, tuple[Any, PackedModel | None]] = WeakKeyDictionary()


def pack_layers(module: nn.Module) -> list[PackedLinear]:
    """Replace a module's linear layers with packed ones. Returns the packed layers."""
    packed = []
    for part in list(module.modules()):
        for name, child in part.named_children():
            if type(child) in (nn.Linear, Conv1D):
                packed.append(PackedLinear(child))
                setattr(part, name, packed[-1])
    return packed


def can_pack(model: nn.Module) -> bool:
    """Whether packing is possible and takes less than half of the free memory. False for models
    that other libraries have wrapped, sharded or quantised."""
    if not torch.backends.mkldnn.is_available():
        return False
    parameters = list(model.parameters())
    plain = all(type(p) is nn.Parameter and p.device.type == "cpu" for p in parameters)
    if not plain or not all(p.dtype in _SUPPORTED and _SUPPORTED[p.dtype]() for p in parameters):
        return False
    if is_hooked(model) or getattr(model, "is_quantized", False):
        return False
    return 2 * sum(p.nbytes for p in parameters) < psutil.virtual_memory().available
