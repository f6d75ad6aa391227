"""Prepares a model for the loop on a CPU: packed weights, lean layers, and our attention.

A decode step multiplies a few rows by every weight of the model. On every call, PyTorch's CPU
kernels first convert each weight to their layout. For so few rows, that costs more than the
product. Converting once makes a step of a small model a third to a half shorter.

A step of a small model also spends much time between its products. So layers of the llama kind are
replaced by `LeanLayer`, if they compute the same. The original model is not changed.
"""

import copy
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from decode.target.cpu_kernels import ATTENTION, LeanLayer, PackedLinear
from decode.target.pretrained import is_hooked

# A layer is compared on tokens at the positions 0, STRIDE, 2·STRIDE, ….
TOKENS, STRIDE = 5, 7
# The largest difference, as a share of the largest number that the layer adds.
TOLERANCE = 1e-3

_SUPPORTED: dict[torch.dtype, Callable[[], bool]] = {
    torch.float32: lambda: True,
    torch.bfloat16: lambda: bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    torch.float16: lambda: bool(torch.ops.mkldnn._is_mkldnn_fp16_supported()),
}


def packed_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model with packed linear layers. The original model is not changed.

    The copy shares every parameter and buffer with the original, and its packed weights take about
    the same memory again. After weights were changed in place, call `refresh_packed`.
    """
    packed = _sharing_copy(model)
    pack_layers(packed)
    return packed


def fast_copy(model: PreTrainedModel) -> PreTrainedModel:
    """As `packed_copy`, and with our attention and lean layers where the model allows them."""
    fast = _sharing_copy(model)
    if replace_attention(fast):
        make_lean(fast)
    pack_layers(fast)
    return fast


def _sharing_copy(model: PreTrainedModel) -> PreTrainedModel:
    shared: dict[int, Any] = {
        id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]
    }
    copied: PreTrainedModel = copy.deepcopy(model, shared)
    return copied


def refresh_packed(module: nn.Module) -> None:
    """Use weights that were changed in place, for example by an optimizer."""
    for layer in module.modules():
        if isinstance(layer, PackedLinear):
            layer.refresh()


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """A model as the loop runs it: its `fast_copy` if possible, else the model itself. A chain may
    be fed with `each_token_alone`, over keys padded to a multiple of `SLOT_STEP`, if
    `has_replaced_attention` is true for the result.

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
        packed = fast_copy(model) if can_pack(model) else None
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
    return reason_against_packing(model) is None


def reason_against_packing(model: nn.Module) -> str | None:
    """Why the linear layers of a model cannot be packed, as the end of a sentence. None: they
    can."""
    if not torch.backends.mkldnn.is_available():
        return "this PyTorch has no oneDNN"
    parameters = list(model.parameters())
    if not all(p.device.type == "cpu" for p in parameters):
        return "the weights are not on the CPU"
    if not all(type(p) is nn.Parameter for p in parameters):
        return "another library has sharded or quantised the weights"
    for dtype in {p.dtype for p in parameters}:
        if not has_products(dtype):
            return f"this CPU has no matrix products in {str(dtype).removeprefix('torch.')}"
    if is_hooked(model) or getattr(model, "is_quantized", False):
        return "another library has wrapped or quantised the model"
    if 2 * sum(p.nbytes for p in parameters) >= psutil.virtual_memory().available:
        return "a second copy of the weights would take more than half of the free memory"
    return None


def has_products(dtype: torch.dtype) -> bool:
    """Whether this CPU has matrix products in a dtype. Without them PyTorch converts, which is
    slow."""
    return dtype in _SUPPORTED and _SUPPORTED[dtype]()


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


def make_lean(model: PreTrainedModel) -> None:
    """Replace the layers of the llama kind by lean ones, where these compute the same."""
    stack: Any = model.base_model
    layers, rotary = getattr(stack, "layers", None), getattr(stack, "rotary_emb", None)
    if not isinstance(layers, nn.ModuleList) or rotary is None:
        return
    for number, layer in enumerate(layers):
        if is_standard(layer) and computes_the_same(layer, rotary):
            layers[number] = LeanLayer(layer)


def is_standard(layer: nn.Module) -> bool:
    """Whether a layer has the parts of llama's, and no others."""
    parts = dict(layer.named_children())
    if parts.keys() != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return False
    attention, mlp = (dict(parts[name].named_children()) for name in ("self_attn", "mlp"))
    products = [attention.get(f"{name}_proj") for name in "qkvo"]
    products += [mlp.get(f"{name}_proj") for name in ("gate", "up", "down")]
    return (
        attention.keys() <= {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
        and mlp.keys() == {"gate_proj", "up_proj", "down_proj", "act_fn"}
        and all(type(product) is nn.Linear for product in products)
        and all(hasattr(parts["self_attn"], name) for name in ("layer_idx", "head_dim", "scaling"))
        and all(hasattr(norm, "variance_epsilon") for norm in _norms(layer))
    )


def _norms(layer: Any) -> list[nn.Module]:
    attention = layer.self_attn
    inner = [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
    return [layer.input_layernorm, layer.post_attention_layernorm, *inner]


@torch.no_grad()
def computes_the_same(layer: nn.Module, rotary: nn.Module) -> bool:
    """Whether a lean layer adds the same to random hidden states, in float32 up to rounding. A
    layer may have the parts of llama's and combine them in another way."""
    layer = copy.deepcopy(layer).float()
    lean = LeanLayer(layer)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, TOKENS, len(lean.attention_norm.weight), generator=generator)
    try:
        embeddings = rotary(states, torch.arange(TOKENS)[None] * STRIDE)
        expected = layer(states, attention_mask=None, position_embeddings=embeddings) - states
        update = lean(states, attention_mask=None, position_embeddings=embeddings) - states
    except (TypeError, RuntimeError, AttributeError, ValueError):
        return False  # it takes other arguments, so it is of another kind
    return bool((expected - update).abs().max() <= TOLERANCE * expected.abs().max())
