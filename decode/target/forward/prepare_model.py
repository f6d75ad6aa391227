"""Decides how the loop runs a model, and prepares it: the lean forward, or transformers' forward.

A decode step multiplies a few rows by every weight of the model. On every call, PyTorch's CPU
kernels first convert each weight to their layout. For so few rows, that costs more than the
product. Converting once makes a step of a small model a third to a half shorter.

A step of a small model also spends much time between its products. So a model whose layers are of a
standard kind runs through `LeanForward`, if that computes the same. The model is not changed.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import psutil
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from decode.errors import UserError
from decode.target.forward.lean_forward import (
    AttentionMask,
    LayerParts,
    LeanForward,
    LeanLayer,
    rotation_of,
)
from decode.target.forward.lean_parts import ACTIVATIONS, LeanNorm, Packed, PackedLinear
from decode.target.forward.transformers_forward import ATTENTION, TransformersForward
from decode.target.kinds.decoder_positions import read_positions
from decode.target.kinds.encoder_decoder import DecoderForward
from decode.target.pretrained import has_encoder, is_hooked, is_sharded

logger = logging.getLogger(__name__)

# A layer is compared on tokens at the positions 0, STRIDE, 2·STRIDE, ….
TOKENS, STRIDE = 5, 7
# The largest difference, as a share of the largest number that the layer adds.
TOLERANCE = 1e-3
# The same for the logits of the model. They are compared in the model's dtype, because a float32
# copy of the model may not fit into memory.
LOGIT_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}

Forward = LeanForward | TransformersForward

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
    """As `packed_copy`, and with our attention where the model allows it."""
    fast = _sharing_copy(model)
    replace_attention(fast)
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
        if isinstance(layer, Packed):
            layer.refresh()


def prepare(model: PreTrainedModel, *, lean: bool | None = None) -> Forward:
    """The forward that the loop runs.

    lean: the lean forward or transformers'. None: what an earlier call chose for this model; else
    lean where products can be packed and it computes the same. On a GPU the default is
    transformers' forward, because the lean one was never measured there.

    It is made once, and all decoders of the model share it while the model exists: packing takes
    time and memory, and two decoders can be compared only if both run on the same kernels. It is
    made again if the model was rebuilt, for example with an adapter or another output layer. A
    decoder keeps the forward that it was made with. Raises UserError if lean is True and the model
    cannot run lean, and for a sharded model, whose passes all processes must do together.
    """
    if is_sharded(model):
        raise UserError(
            f"{type(model).__name__} is sharded over several processes, so it cannot decode; load "
            "it without target.sharded, on several devices if it needs them (device_map)"
        )
    state = (
        # The forward keeps the parameters alive, so no other object can get one of these ids.
        tuple(id(parameter) for parameter in model.parameters()),
        tuple(ref(module) for module in model.modules()),
        model.config._attn_implementation,
        is_hooked(model),
    )
    known = _FORWARDS.get(model)
    if lean is None and known is not None:
        lean = known.lean
    if known is None or known.state != state or known.lean != lean:
        _FORWARDS[model] = known = _Prepared(state, lean, _prepared(model, lean))
    return TransformersForward(model) if known.forward is None else known.forward


@dataclass(frozen=True)
class _Prepared:
    """A forward of a model in a state. forward: None if the model runs as it is."""

    state: Any
    lean: bool | None
    forward: Forward | None


# A prepared forward must not refer to the model. Otherwise neither would ever be freed.
_FORWARDS: WeakKeyDictionary[nn.Module, _Prepared] = WeakKeyDictionary()


def _prepared(model: PreTrainedModel, choice: bool | None) -> Forward | None:
    packed = can_pack(model)
    if has_encoder(model) and not choice:
        return _decoder_forward(model, packed)
    if choice or (packed and choice is None):
        lean = lean_forward(model, packed=packed)
        if lean is not None:
            return lean
        if choice:
            raise UserError(
                f"{type(model).__name__} cannot run through the lean forward: it is wrapped, "
                "quantised or on several devices, or computes something else; leave the choice out"
            )
        logger.info(
            "%s runs through transformers' forward: its layers are not of a kind that the lean "
            "forward computes",
            type(model).__name__,
        )
    return TransformersForward(fast_copy(model)) if packed else None


def _decoder_forward(model: PreTrainedModel, packed: bool) -> DecoderForward:
    """The forward of a model with an encoder, on a copy that reads the positions of the loop."""
    if _is_wrapped(model):
        raise UserError(
            f"{type(model).__name__} has an encoder, and another library has wrapped or quantised "
            "it; load it on one device and without quantisation"
        )
    decoding = fast_copy(model) if packed else _sharing_copy(model)
    read_positions(decoding)
    return DecoderForward(decoding)


def pack_layers(module: nn.Module, keep: type[nn.Module] = LeanLayer) -> None:
    """Replace a module's linear layers with packed ones, except inside of modules of type `keep`.
    RMS norms become `LeanNorm`s. Parameters keep their names."""
    for name, child in list(module.named_children()):
        lean = _norm(child, True) if type(child).__name__.endswith("RMSNorm") else None
        if type(child) in (nn.Linear, Conv1D):
            setattr(module, name, PackedLinear(child))
        elif lean is not None:
            setattr(module, name, lean)
        elif not isinstance(child, keep):
            pack_layers(child, keep)


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
    if _is_wrapped(model):
        return "another library has wrapped or quantised the model"
    if 2 * sum(p.nbytes for p in parameters) >= psutil.virtual_memory().available:
        return "a second copy of the weights would take more than half of the free memory"
    return None


def _is_wrapped(model: nn.Module) -> bool:
    return is_hooked(model) or bool(getattr(model, "is_quantized", False))


def has_products(dtype: torch.dtype) -> bool:
    """Whether this CPU has matrix products in a dtype. Without them PyTorch converts, which is
    slow."""
    return dtype in _SUPPORTED and _SUPPORTED[dtype]()


def replace_attention(model: PreTrainedModel) -> bool:
    """Make a model use `attention_forward`. Returns False and changes nothing if the
    model does not call attention by name, or was loaded with another implementation than `sdpa`."""
    by_name = getattr(model, "_can_set_attn_implementation", lambda: False)
    if model.config._attn_implementation != "sdpa" or not by_name():
        return False
    model.set_attn_implementation(ATTENTION)
    return True


def watchable_forward(forward: Forward) -> Forward | None:
    """A forward of the same model whose attention calls the watches of masks (`AttentionMask`), on
    the same weights. None if the model does not call attention by name, or is wrapped."""
    if forward.has_our_attention:
        return forward
    assert isinstance(forward, TransformersForward)
    packed = any(isinstance(module, Packed) for module in forward.model.modules())
    if packed or is_hooked(forward.model):  # packed: it was not given our attention for a reason
        return None
    model = _sharing_copy(forward.model)
    return TransformersForward(model) if replace_attention(model) else None


@torch.no_grad()
def lean_forward(model: PreTrainedModel, *, packed: bool | None = None) -> LeanForward | None:
    """The lean forward of a model, or None if it would compute something else.

    packed: with packed products, as on a CPU. Default: if the products can be packed. Else its
    products and norms are for any device, and it needs no second copy of the weights.

    Each layer is compared with transformers' on random states, in float32 up to rounding: a layer
    may have the parts of llama's and combine them in another way. The logits are compared too.
    """
    packed = can_pack(model) if packed is None else packed
    if not all(map(_is_known_code, model.modules())) or _is_wrapped(model):
        return None
    if len({parameter.device for parameter in model.parameters()}) != 1:
        return None
    implementation = str(model.config._attn_implementation)
    # Models without sdpa have a soft cap, which the lean attention computes.
    if implementation != "sdpa" and getattr(model, "_supports_sdpa", True):
        return None
    stack: Any = getattr(model, "base_model", None)
    layers, rotary = getattr(stack, "layers", None), getattr(stack, "rotary_emb", None)
    if not isinstance(layers, nn.ModuleList) or rotary is None:
        return None
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    norm = _norm(getattr(stack, "norm", None), packed)
    if type(output) is not nn.Linear:
        return None
    config = model.config.get_text_config()
    kinds = getattr(rotary, "layer_types", None) or ()
    parts = [layer_parts(layer, config, packed) for layer in layers]
    if norm is None or embedding is None or any(part is None for part in parts):
        return None
    if not all(_computes_the_same(layer, rotary, config, packed) for layer in layers):
        return None
    lean = LeanForward(
        embedding,
        [part for part in parts if part is not None],
        norm,
        output,
        rotary,
        rotary_kinds=kinds,
        softcap=getattr(config, "final_logit_softcapping", None),
        packed=packed,
    )
    return lean if _same_logits(model, lean) else None


def _is_known_code(module: nn.Module) -> bool:
    """Whether a module computes what its class in transformers or PyTorch does. A forward of
    someone else may differ in cases that the comparison does not try."""
    library = type(module).__module__.split(".")[0]
    return library in ("transformers", "torch") and "forward" not in vars(module)


def layer_parts(layer: Any, config: Any, packed: bool) -> LayerParts | None:
    """The parts of a decoder layer, or None if it has parts of another kind. Whether it combines
    them as `LeanLayer` does is not checked here. packed: the form of the norms."""
    children, attention, mlp = dict(layer.named_children()), *_blocks(layer)
    if attention is None or mlp is None:
        return None
    norms = {name: _norm(child, packed) for name, child in children.items() if "norm" in name}
    inner = {name: _norm(getattr(attention, name, None), packed) for name in ("q_norm", "k_norm")}
    rest = {name for name in children if name not in norms} - {"self_attn", "mlp"}
    only_dropout = all(type(children[name]) is nn.Dropout for name in rest)
    roles = _NORM_ROLES.get(frozenset(norms))
    qkv = _linears(attention, ("qkv_proj",)) or _linears(attention, ("q_proj", "k_proj", "v_proj"))
    gate_up = _linears(mlp, ("gate_up_proj",)) or _linears(mlp, ("gate_proj", "up_proj"))
    out, down = _linears(attention, ("o_proj",)), _linears(mlp, ("down_proj",))
    activation = _activation(getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None))
    products = len(qkv) + len(out) + len(gate_up) + len(down)
    modules = len(dict(attention.named_children())) + len(dict(mlp.named_children())) - 1
    query_norms = sum(norm is not None for norm in inner.values())
    if not (qkv and gate_up and out and down and only_dropout) or roles is None:
        return None
    if activation is None or any(norm is None for norm in norms.values()) or query_norms == 1:
        return None
    if modules != products + query_norms:
        return None  # another part of attention or MLP
    size = int(attention.head_dim)
    heads = out[0].in_features // size
    number = getattr(attention, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    return LayerParts(
        qkv,
        out[0],
        gate_up,
        down[0],
        head_size=size,
        query_heads=heads,
        key_heads=(sum(linear.out_features for linear in qkv) // size - heads) // 2,
        activation=activation,
        **{role: norms[name] for name, role in roles.items()},
        query_norm=inner["q_norm"],
        key_norm=inner["k_norm"],
        scale=float(attention.scaling),
        softcap=getattr(attention, "attn_logit_softcapping", None),
        rotates=bool(getattr(attention, "use_rope", True)),
        kind=kinds[number] if kinds and number is not None else "",
    )


# Which norm is where: before attention or MLP (in), or on their output (out).
_NORM_ROLES = {
    frozenset(roles): roles
    for roles in (
        {"input_layernorm": "attention_in", "post_attention_layernorm": "mlp_in"},
        {"post_attention_layernorm": "attention_out", "post_feedforward_layernorm": "mlp_out"},
        {
            "input_layernorm": "attention_in",
            "post_attention_layernorm": "attention_out",
            "pre_feedforward_layernorm": "mlp_in",
            "post_feedforward_layernorm": "mlp_out",
        },
    )
}


def _blocks(layer: nn.Module) -> tuple[Any, Any]:
    attention, mlp = (getattr(layer, name, None) for name in ("self_attn", "mlp"))
    if not all(hasattr(attention, name) for name in ("head_dim", "scaling")):
        return None, None
    return attention, mlp


def _linears(module: nn.Module, names: Sequence[str]) -> list[nn.Linear]:
    """The named linear layers of a module; empty if it lacks one."""
    linears = [getattr(module, name, None) for name in names]
    return [x for x in linears if type(x) is nn.Linear] if None not in linears else []


def _norm(norm: Any, packed: bool) -> LeanNorm | None:
    """A RMS norm with weight w or 1 + w. None for other modules."""
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or not isinstance(eps, float) or weight.ndim != 1:
        return None
    x = torch.linspace(-1, 2, len(weight), dtype=weight.dtype, device=weight.device)[None]
    with torch.no_grad():
        expected = norm(x).float()
        for offset in (0.0, 1.0):
            lean = LeanNorm(weight, eps, offset, packed=packed)
            difference = (lean(x).float() - expected).abs().max()
            if difference <= LOGIT_TOLERANCE[weight.dtype] * expected.abs().max():
                return lean
    return None


def _activation(function: Any) -> tuple[str, str] | None:
    if not callable(function):
        return None
    x = torch.linspace(-4, 4, 33)
    for name, known in ACTIVATIONS.items():
        if torch.allclose(function(x), known(x), atol=1e-6):
            return name
    return None


def _computes_the_same(layer: nn.Module, rotary: nn.Module, config: Any, packed: bool) -> bool:
    """Whether a lean layer adds the same to random hidden states."""
    layer = copy.deepcopy(layer).float()
    parts = layer_parts(layer, config, packed)
    if parts is None:
        return False
    lean, device = LeanLayer(parts, packed=packed), parts.out.weight.device
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, TOKENS, parts.out.out_features, generator=generator).to(device)
    positions = torch.arange(TOKENS, device=device)[None] * STRIDE
    mask = AttentionMask(_causal(device), torch.float32)
    assert mask.additive is not None
    kind = (parts.kind,) if getattr(rotary, "layer_types", None) else ()

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert parts is not None
        return mask.attend(query, key, value, parts.scale or 1.0, parts.softcap)

    try:
        cos, sin = rotary(states, positions, *kind)
        rotation = rotation_of(cos, sin)
        update = lean(states, rotation, attend) - states
        expected = layer(states, attention_mask=mask.additive, position_embeddings=(cos, sin))
        if not isinstance(expected, Tensor):
            return False
        expected = expected - states
    except (TypeError, RuntimeError, AttributeError, ValueError):
        return False  # it takes other arguments, so it is of another kind
    return bool((expected - update).abs().max() <= TOLERANCE * expected.abs().max())


def _same_logits(model: PreTrainedModel, lean: LeanForward) -> bool:
    """Whether the logits of a short text are those of the model. This checks what is not in the
    layers: embedding, final norm, output layer, and what follows it."""
    config = model.config.get_text_config()
    positions = torch.arange(TOKENS, device=model.device)[None]
    ids = positions * (config.vocab_size // TOKENS - 1) + 1
    mask = AttentionMask(_causal(model.device), model.dtype)
    layers = [_NoPast()] * len(lean.layers)
    expected = model(input_ids=ids, use_cache=False).logits.float()
    logits, _ = lean(ids, positions, [mask] * len(layers), layers)
    difference = (logits.float() - expected).abs().max()
    return bool(difference <= LOGIT_TOLERANCE[model.dtype] * expected.abs().max())


def _causal(device: torch.device) -> Tensor:
    """bool [1, 1, TOKENS, TOKENS]"""
    return torch.ones(TOKENS, TOKENS, device=device).tril().bool()[None, None]


class _NoPast:
    """Slots of a text without a past."""

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys, values
