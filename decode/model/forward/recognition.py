"""Recognises models that the lean forward computes: reads their parts, and compares the results.

A model is not recognised by its name. Its layers must have the parts of llama's, and on random
numbers the lean forward must compute what transformers' forward computes.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.model.forward.attention_mask import AttentionMask
from decode.model.forward.layer_parts import LayerParts
from decode.model.forward.lean_forward import LeanForward
from decode.model.forward.lean_layer import LeanLayer
from decode.model.forward.lean_parts import ACTIVATIONS, LeanNorm
from decode.model.forward.low_rank_output import LowRankLinear
from decode.model.forward.rotations import Rotation
from decode.model.pretrained import is_hooked

# A layer is compared on tokens at the positions 0, STRIDE, 2·STRIDE, ….
TOKENS, STRIDE = 5, 7
# The largest difference, as a share of the largest number that the layer adds.
TOLERANCE = 1e-3
# The same for norms, embeddings and logits. They are compared in the model's dtype, because a
# float32 copy of the model may not fit into memory.
LOGIT_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
# In 16 bits a small factor hides below that tolerance. Rounding errors cancel in the factor that
# fits all numbers best, so this one may differ from 1 only so far.
FACTOR_TOLERANCE = 0.005


class NotLean(Exception):
    """The lean forward would compute something else than the model. The text says why, as the end
    of a sentence."""


@torch.no_grad()
def lean_forward(model: PreTrainedModel) -> LeanForward:
    """The lean forward of a model whose products can be packed. Raises NotLean if it would compute
    something else.

    One layer of each kind is compared with transformers' on random states, in float32 up to
    rounding: a layer may have the parts of llama's and combine them in another way. What is before
    and after the layers is compared too, and the logits.
    """
    if is_wrapped(model):
        raise NotLean("another library has wrapped or quantised the model")
    for module in model.modules():
        foreign = type(module).__module__.split(".")[0] not in ("transformers", "torch")
        if foreign and type(module) is not LowRankLinear:
            # A forward of someone else may differ in cases that the comparison does not try.
            raise NotLean(f"{type(module).__name__} is no class of transformers or PyTorch")
    if len({parameter.device for parameter in model.parameters()}) != 1:
        raise NotLean("its weights are on several devices")
    implementation = str(model.config._attn_implementation)
    # Models without sdpa have a soft cap, which the lean attention computes.
    if implementation != "sdpa" and getattr(model, "_supports_sdpa", True):
        raise NotLean(f"its attention is {implementation!r}, not 'sdpa'")
    stack: Any = getattr(model, "base_model", None)
    layers, rotary = getattr(stack, "layers", None), getattr(stack, "rotary_emb", None)
    if not isinstance(layers, nn.ModuleList) or rotary is None:
        raise NotLean("it is no list of layers with rotary positions")
    last_norm: Any = getattr(stack, "norm", None)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    norm = lean_norm(last_norm)
    if embedding is None or norm is None or type(output) not in (nn.Linear, LowRankLinear):
        raise NotLean("its embedding, last norm or output layer is of another kind")
    config = model.config.get_text_config()
    tried: set[Any] = set()
    parts = [_checked_parts(layer, rotary, config, tried) for layer in layers]
    lean = LeanForward(
        embedding,
        parts,
        norm,
        output,
        rotary,
        rotary_kinds=getattr(rotary, "layer_types", None) or (),
        softcap=getattr(config, "final_logit_softcapping", None),
    )
    _require_same_logits(model, lean, layers[0], last_norm)
    return lean


def is_wrapped(model: nn.Module) -> bool:
    """Whether another library runs code in the model, or has quantised it."""
    return is_hooked(model) or bool(getattr(model, "is_quantized", False))


def _checked_parts(layer: nn.Module, rotary: nn.Module, config: Any, tried: set[Any]) -> LayerParts:
    """The parts of a layer that computes what `LeanLayer` computes. tried: the kinds of layers that
    did so. Raises NotLean."""
    parts = layer_parts(layer, config)
    if parts is None:
        raise NotLean(f"{type(layer).__name__} has parts of another kind than llama's layers")
    kind = parts.kind, _kind(layer)
    if kind not in tried and not _computes_the_same(layer, rotary, config):
        raise NotLean(f"{type(layer).__name__} computes something else with the parts of llama's")
    tried.add(kind)
    return parts


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """What decides how a layer computes, without the values of its weights: the classes of its
    parts, their settings and the shapes of their weights."""
    return tuple(
        (
            name,
            type(part),
            tuple((x, y) for x, y in vars(part).items() if _is_setting(x, y)),
            tuple((x, y.shape, y.dtype) for x, y in part.named_parameters(recurse=False)),
        )
        for name, part in layer.named_modules()
    )


def _is_setting(name: str, value: Any) -> bool:
    """Whether an attribute of a module is a setting, and not where the module is."""
    simple = isinstance(value, bool | int | float | str) or value is None
    return simple and name not in ("layer_idx", "layer_id", "training")


def layer_parts(layer: Any, config: Any) -> LayerParts | None:
    """The parts of a decoder layer, or None if it has parts of another kind. Whether it combines
    them as `LeanLayer` does is not checked here."""
    attention: Any = getattr(layer, "self_attn", None)
    mlp: Any = getattr(layer, "mlp", None)
    if mlp is None or not (hasattr(attention, "head_dim") and hasattr(attention, "scaling")):
        return None
    children = dict(layer.named_children())
    norms = {name: lean_norm(child) for name, child in children.items() if "norm" in name}
    inner = {name: lean_norm(getattr(attention, name, None)) for name in ("q_norm", "k_norm")}
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


def _linears(module: nn.Module, names: Sequence[str]) -> list[nn.Linear]:
    """The named linear layers of a module; empty if it lacks one."""
    linears = [getattr(module, name, None) for name in names]
    return [x for x in linears if type(x) is nn.Linear] if None not in linears else []


def lean_norm(norm: Any) -> LeanNorm | None:
    """A RMS norm with weight w or 1 + w. None for other modules."""
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or not isinstance(eps, float) or weight.ndim != 1:
        return None
    x = torch.linspace(-1, 2, len(weight), dtype=weight.dtype, device=weight.device)[None]
    with torch.no_grad():
        expected = norm(x)
        for offset in (0.0, 1.0):
            lean = LeanNorm(weight, eps, offset)
            if _agree(lean(x), expected, LOGIT_TOLERANCE[weight.dtype]):
                return lean
    return None


def _activation(function: Any) -> tuple[str, str] | None:
    if not callable(function):
        return None
    x = torch.linspace(-64, 64, 513)
    for name, known in ACTIVATIONS.items():
        if torch.allclose(function(x), known(x), atol=1e-6):
            return name
    return None


def _computes_the_same(layer: nn.Module, rotary: nn.Module, config: Any) -> bool:
    """Whether a lean layer adds the same to random hidden states."""
    layer = copy.deepcopy(layer).float()
    parts = layer_parts(layer, config)
    if parts is None:
        return False
    lean, device = LeanLayer(parts), parts.out.weight.device
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
        update = lean(states, Rotation(cos, sin), attend) - states
        expected = layer(states, attention_mask=mask.additive, position_embeddings=(cos, sin))
        if not isinstance(expected, Tensor):
            return False
        expected = expected - states
    except (TypeError, RuntimeError, AttributeError, ValueError):
        return False  # it takes other arguments, so it is of another kind
    return bool((expected - update).abs().max() <= TOLERANCE * expected.abs().max())


def _require_same_logits(
    model: PreTrainedModel, lean: LeanForward, first_layer: nn.Module, last_norm: nn.Module
) -> None:
    """Compare the logits of a short text with those of the model. Raises NotLean.

    What is before the layers and after them is also compared alone, from the model's states: there
    rounding is so small that it hides no factor, such as one on the logits.
    """
    config = model.config.get_text_config()
    positions = torch.arange(TOKENS, device=model.device)[None]
    ids = positions * (config.vocab_size // TOKENS - 1) + 1
    mask = AttentionMask(_causal(model.device), model.dtype)
    layers = [_NoPast()] * len(lean.layers)
    states: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        states[module] = inputs[0] if inputs else named["hidden_states"]

    with (
        first_layer.register_forward_pre_hook(keep, with_kwargs=True),
        last_norm.register_forward_pre_hook(keep, with_kwargs=True),
    ):
        expected = model(input_ids=ids, use_cache=False).logits
    logits, _ = lean(ids, positions, [mask] * len(layers), layers)
    tolerance = LOGIT_TOLERANCE[model.dtype]
    if not _agree(lean.embedding(ids), states[first_layer], tolerance):
        raise NotLean("it does something else between its embedding and its layers")
    if not _agree(lean.read_out(lean.norm(states[last_norm])), expected, tolerance):
        raise NotLean("it does something else between its layers and its logits")
    if not _difference(logits, expected) <= tolerance:  # also if it is NaN
        raise NotLean("its logits are other ones")


def _agree(lean: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether two results of a few operations are the same up to rounding."""
    x, y = lean.float().flatten(), expected.float().flatten()
    factor_error = ((x - y) @ y).abs() / (y @ y).clamp(min=torch.finfo(y.dtype).tiny)
    return _difference(lean, expected) <= tolerance and bool(factor_error <= FACTOR_TOLERANCE)


def _difference(lean: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest number that is expected."""
    largest = expected.float().abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return float((lean.float() - expected.float()).abs().max() / largest)


def _causal(device: torch.device) -> Tensor:
    """bool [1, 1, TOKENS, TOKENS]"""
    return torch.ones(TOKENS, TOKENS, device=device).tril().bool()[None, None]


class _NoPast:
    """Slots of a text without a past."""

    real = None

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys, values
