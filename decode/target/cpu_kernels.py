"""Fast decoding on a CPU: weights packed for its matrix kernels, and a faster attention.

A decode step multiplies a few rows by every weight of the model. On every call, PyTorch's CPU
kernels first convert each weight to their layout. For so few rows, that costs more than the
product. Converting once makes a step of a small model a third to a half shorter. The results come
from the same kernels.

The attention replaces transformers' `sdpa`. It copies no keys and values: the query heads that
share a key head are rows of one query. For chains, a token also gets the same bits for any number
of tokens fed with it.

Shapes of attention: B rows, n tokens fed per row, H query heads, K key heads, G = H / K, S slots,
D head size.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary, ref

import psutil
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.pytorch_utils import Conv1D

from decode.target.pretrained import is_hooked

ATTENTION = "draftsmith"

# Keys are padded to a multiple of this many slots. The kernel sums the slots one vector width at a
# time. With this padding, masked slots at the end do not change any partial sum.
SLOT_STEP = 16

# Arguments that some models pass in addition to the mask; `attention_forward` does not take them.
LEFT_TO_TRANSFORMERS = ("position_bias", "softcap", "s_aux", "cache")

# Nobody drafts longer chains, and more tokens one by one would take long.
LONGEST_CHAIN = 32

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
        self._packed_state: tuple[int, int] | None = None
        self.refresh()

    def refresh(self) -> None:
        """Pack again if the weight has changed since the last packing."""
        # Tensors created in inference mode have no version counter. They are not trained either.
        version = 0 if self.weight.is_inference() else self.weight._version
        state = (self.weight.data_ptr(), version)
        if state != self._packed_state:
            weight = self.weight.detach()
            weight = weight.t().contiguous() if self.transposed else weight
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
            self._packed_state = state

    def forward(self, x: Tensor) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self.bias, "none", [], ""
        )
        return packed


def packed_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model with packed linear layers. The original model is not changed.

    The copy shares every parameter and buffer with the original, and its packed weights take about
    the same memory again. After weights were changed in place, call `refresh_packed`.
    """
    shared: dict[int, Any] = {
        id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]
    }
    packed: PreTrainedModel = copy.deepcopy(model, shared)
    pack_layers(packed)
    return packed


def refresh_packed(module: nn.Module) -> None:
    """Use weights that were changed in place, for example by an optimizer."""
    for layer in module.modules():
        if isinstance(layer, PackedLinear):
            layer.refresh()


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """A model as the loop runs it: a packed copy with `attention_forward` if possible, else the
    model itself. A chain may be fed with `each_token_alone`, over keys padded to a multiple of
    `SLOT_STEP`, if `has_replaced_attention` is true for the result.

    The copy is made once, and all decoders of the model share it while the model exists: packing
    takes time and memory, and two decoders can be compared only if both run on the same kernels. It
    is made again if the model was rebuilt, for example with an adapter or another output layer.
    """
    state = (
        # The packed copy keeps the parameters alive, so no other object can get one of these ids.
        tuple(id(parameter) for parameter in model.parameters()),
        tuple(ref(module) for module in model.modules()),
        model.config._attn_implementation,
        is_hooked(model),
    )
    if model not in _COPIES or _COPIES[model][0] != state:
        packed = None
        if can_pack(model):
            packed = packed_copy(model)
            replace_attention(packed)
        _COPIES[model] = state, packed
    packed = _COPIES[model][1]
    return model if packed is None else packed


# The packed copy must not refer to the model. Otherwise neither would ever be freed.
_COPIES: WeakKeyDictionary[nn.Module, tuple[Any, PreTrainedModel | None]] = WeakKeyDictionary()


def pack_layers(module: nn.Module) -> None:
    """Replace a module's linear layers with packed ones."""
    for part in list(module.modules()):
        for name, child in part.named_children():
            if type(child) in (nn.Linear, Conv1D):
                setattr(part, name, PackedLinear(child))


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


_each_token_alone: ContextVar[bool] = ContextVar("each_token_alone", default=False)


@contextmanager
def each_token_alone() -> Iterator[None]:
    """Inside this context, a token's attention has the same bits for any number of tokens fed with
    it.

    Holds for 16-bit weights, and keys padded to a multiple of `SLOT_STEP`.
    """
    token = _each_token_alone.set(True)
    try:
        yield
    finally:
        _each_token_alone.reset(token)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Same interface as transformers' attention functions: query [B, H, n, D], key and value
    [B, K, S, D], an additive mask [B, 1, n, S] or None; returns [B, n, H, D]. Cases that it does
    not support (no mask, a mask per head, a position bias) go to the function of transformers."""
    unsupported = any(kwargs.get(name) is not None for name in LEFT_TO_TRANSFORMERS)
    if attention_mask is None or attention_mask.shape[1] != 1 or unsupported:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    rows, heads, fed, _ = query.shape
    key_heads, slots = key.shape[1], key.shape[2]
    group = heads // key_heads
    query = query.unflatten(1, (key_heads, group))
    mask = attention_mask.expand(rows, 1, fed, slots)
    attend = torch.nn.functional.scaled_dot_product_attention
    if _each_token_alone.get():
        # The kernel sees n batches of one token each, so the products are the same for any n. Rows
        # and key heads are one dimension, so all n batches share the keys without a copy.
        query = query.permute(3, 0, 1, 2, 4).flatten(1, 2)  # [n, B·K, G, D]
        key, value = (
            x.flatten(0, 1).expand(fed, rows * key_heads, slots, x.shape[3]) for x in (key, value)
        )
        mask = mask.permute(2, 0, 1, 3)  # [n, B, 1, S]
        if rows > 1:
            mask = mask[:, :, None].expand(-1, -1, key_heads, -1, -1).flatten(1, 2)
        out = attend(query, key, value, attn_mask=mask, scale=scaling)
        out = out.unflatten(1, (rows, key_heads)).transpose(0, 1)  # [B, n, K, G, D]
        return out.reshape(rows, fed, heads, value.shape[3]), None
    mask = mask.repeat(1, 1, group, 1)
    out = attend(query.flatten(2, 3), key, value, attn_mask=mask, scale=scaling)
    out = out.unflatten(2, (group, fed)).permute(0, 3, 1, 2, 4)
    return out.reshape(rows, fed, heads, value.shape[3]), None


def has_replaced_attention(model: PreTrainedModel) -> bool:
    """Whether a model uses `attention_forward`."""
    return bool(model.config._attn_implementation == ATTENTION)


def replace_attention(model: PreTrainedModel) -> bool:
    """Make a model use `attention_forward`. Returns False and changes nothing if the
    model does not call attention by name, or was loaded with another implementation than `sdpa`."""
    by_name = getattr(model, "_can_set_attn_implementation", lambda: False)
    if model.config._attn_implementation != "sdpa" or not by_name():
        return False
    model.set_attn_implementation(ATTENTION)
    return True


AttentionInterface.register(ATTENTION, attention_forward)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
