"""Decides how the loop runs a model, and prepares it: the lean forward, or transformers' forward.

A decode step multiplies a few rows by every weight of the model. On every call, PyTorch's CPU
kernels first convert each weight to their layout. For so few rows, that costs more than the
product. Converting once makes a step of a small model a third to a half shorter.

A step of a small model also spends much time between its products. So a model whose layers are of a
standard kind runs through `LeanForward`, if that computes the same. The model is not changed.
"""

import copy
import logging
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from decode.base.errors import UserError
from decode.model.forward.lean_forward import LeanForward
from decode.model.forward.lean_layer import LeanLayer
from decode.model.forward.lean_parts import PackedLayer, PackedLinear, lacking_operators
from decode.model.forward.low_rank import adapted_forward, adapters_of
from decode.model.forward.recognition import NotLean, is_wrapped, lean_forward, lean_norm
from decode.model.forward.transformers_forward import ATTENTION, TransformersForward
from decode.model.kinds.decoder_positions import counts_positions, read_positions
from decode.model.kinds.encoder_decoder import DecoderForward
from decode.model.memory import free_bytes
from decode.model.pretrained import adapters_in_use, has_encoder, is_hooked, is_sharded

logger = logging.getLogger(__name__)

Forward = LeanForward | TransformersForward

# PyTorch's operators that say whether a CPU has matrix products in a dtype.
_SUPPORTED = {
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}


def packed_copy(model: PreTrainedModel, *, our_attention: bool = False) -> PreTrainedModel:
    """A copy of a model with packed linear layers. The original model is not changed.

    our_attention: also with our attention, where the model allows it. The copy shares every
    parameter and buffer with the original, and its packed weights take about the same memory again.
    After weights were changed in place, call `refresh_packed`.
    """
    packed = _sharing_copy(model)
    if our_attention:
        replace_attention(packed)
    pack_layers(packed)
    return packed


def _sharing_copy(model: PreTrainedModel) -> PreTrainedModel:
    shared: dict[int, Any] = {
        id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]
    }
    copied: PreTrainedModel = copy.deepcopy(model, shared)
    return copied.eval()


def refresh_packed(module: nn.Module) -> None:
    """Use weights that were changed in place, for example by an optimizer."""
    for layer in module.modules():
        if isinstance(layer, PackedLayer):
            layer.refresh()


def prepare(model: PreTrainedModel, *, lean: bool | None = None) -> Forward:
    """The forward that the loop runs.

    lean: the lean forward or transformers'. None: what an earlier call chose for this model; else
    lean where products can be packed, which is on a CPU only, and it computes the same.

    It is made once, and all decoders of the model share it while the model exists: packing takes
    time and memory, and two decoders can be compared only if both run on the same kernels. It is
    made again if the model was rebuilt, for example with an adapter or another output layer. A
    decoder keeps the forward that it was made with. A warning says why a model on the CPU does not
    run lean, unless the caller chose. Raises UserError if lean is True and the model cannot run
    lean, and for a sharded model, whose passes all processes must do together.
    """
    prepared = _prepared(model, lean)
    return TransformersForward(model) if prepared.forward is None else prepared.forward


def reason_against_lean(model: PreTrainedModel) -> str | None:
    """Why a model runs through transformers' forward, as the end of a sentence. None: it runs
    lean. Prepares the model if no call of `prepare` did. Raises as `prepare`."""
    return _prepared(model, None).reason


def _prepared(model: PreTrainedModel, lean: bool | None) -> "_Prepared":
    if is_sharded(model):
        raise UserError(
            f"{type(model).__name__} is sharded over several processes, so it cannot decode; load "
            "it without target.sharded, on several devices if it needs them (device_map)"
        )
    state, known = _state(model), _FORWARDS.get(model)
    if lean is None and known is not None:
        lean = known.lean
    if known is None or known.state != state or known.lean != lean:
        _FORWARDS[model] = known = _Prepared(state, lean, *_chosen_forward(model, lean))
    return known


def _state(model: PreTrainedModel) -> Any:
    """What a prepared forward depends on."""
    return (
        # The forward keeps the parameters alive, so no other object can get one of these ids.
        tuple(id(parameter) for parameter in model.parameters()),
        tuple(ref(module) for module in model.modules()),
        model.config._attn_implementation,
        is_hooked(model),
        adapters_in_use(model),
    )


def keep_prepared(model: PreTrainedModel) -> None:
    """The forward of a model stays, although its modules are others now."""
    _FORWARDS[model] = replace(_FORWARDS[model], state=_state(model))


@dataclass(frozen=True)
class _Prepared:
    """A forward of a model in a state. forward: None if the model runs as it is. reason: why it
    does not run lean."""

    state: Any
    lean: bool | None
    forward: Forward | None
    reason: str | None


# A prepared forward must not refer to the model. Otherwise neither would ever be freed.
_FORWARDS: WeakKeyDictionary[nn.Module, _Prepared] = WeakKeyDictionary()


def _chosen_forward(
    model: PreTrainedModel, choice: bool | None
) -> tuple[Forward | None, str | None]:
    """The forward, None for the model as it is, and why it is not the lean one."""
    if (low_rank := adapters_of(model)) is not None:
        base = _prepared(low_rank[0], choice)
        forward = base.forward
        return forward and adapted_forward(forward, low_rank[1]), base.reason
    name, unpacked = type(model).__name__, reason_against_packing(model)
    packed, encoder = unpacked is None, has_encoder(model)
    if choice is False:
        reason: str | None = "transformers' forward was chosen"
    elif encoder and not choice:
        reason = "it has an encoder"
    elif unpacked is not None and not choice:
        reason = unpacked
    else:
        try:
            if unpacked is not None:
                raise NotLean(unpacked)
            return lean_forward(model), None
        except NotLean as error:
            if choice:
                raise UserError(
                    f"{name} cannot run through the lean forward: {error}; leave the choice out"
                ) from None
            reason = str(error)
    # Elsewhere than on a CPU, and with an encoder, transformers' forward is what is expected.
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    expected = choice is False or not on_cpu or (packed and encoder)
    more = "" if reason == unpacked or packed else f"; its products are not packed: {unpacked}"
    logger.log(
        logging.INFO if expected else logging.WARNING,
        "%s runs through transformers' forward, which takes longer than the lean one: %s%s",
        name,
        reason,
        more,
    )
    if encoder and is_wrapped(model):
        raise UserError(
            f"{name} has an encoder, and another library has wrapped or quantised it; load it on "
            "one device and without quantisation"
        )
    # PyTorch's own choice for a CPU may store all scores.
    alone = on_cpu and not is_wrapped(model)
    if not (packed or encoder or alone or counts_positions(model)):
        return None, reason
    other = packed_copy(model, our_attention=True) if packed else _sharing_copy(model)
    if alone and not packed:
        replace_attention(other)
    read_positions(other)
    return DecoderForward(other) if encoder else TransformersForward(other), reason


def pack_layers(module: nn.Module, keep: type[nn.Module] = LeanLayer) -> None:
    """Replace a module's linear layers with packed ones, except inside of modules of type `keep`.
    RMS norms become `LeanNorm`s. Parameters keep their names."""
    for name, child in list(module.named_children()):
        lean = lean_norm(child) if type(child).__name__.endswith("RMSNorm") else None
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
    if lacking := lacking_operators():
        names = " and ".join(f"torch.ops.mkldnn.{name}" for name in lacking)
        return f"PyTorch {torch.__version__} has no {names}; with 2.13 it has"
    parameters = list(model.parameters())
    if not all(p.device.type == "cpu" for p in parameters):
        return "the weights are not on the CPU"
    if not all(type(p) is nn.Parameter for p in parameters):
        return "another library has sharded or quantised the weights"
    for dtype in {p.dtype for p in parameters}:
        if not has_products(dtype):
            return f"this CPU has no matrix products in {str(dtype).removeprefix('torch.')}"
    if is_wrapped(model):
        return "another library has wrapped or quantised the model"
    free = free_bytes(torch.device("cpu"))
    if free is not None and 2 * sum(p.nbytes for p in parameters) >= free:
        return "a second copy of the weights would take more than half of the free memory"
    return None


def has_products(dtype: torch.dtype) -> bool:
    """Whether this CPU has matrix products in a dtype. Without them PyTorch converts, which is
    slow."""
    if dtype not in _SUPPORTED:
        return dtype == torch.float32
    is_supported = getattr(torch.ops.mkldnn, _SUPPORTED[dtype], None)
    return is_supported is not None and bool(is_supported())


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
    packed = any(isinstance(module, PackedLayer) for module in forward.model.modules())
    if packed or is_hooked(forward.model):  # packed: it was not given our attention for a reason
        return None
    model = _sharing_copy(forward.model)
    return TransformersForward(model) if replace_attention(model) else None
