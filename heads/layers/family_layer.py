"""A layer of multi-token prediction made of the target's own kind of decoder layer.

The layer is transformers' `MtpLayer`: a projection of [norm(embedding); norm(state)], a decoder
layer of the target's family (with its experts, if it has some), and a norm. The caller chooses the
attention, as for every layer of heads, so the same layer drafts over slots and trains on texts.

Shapes: B rows, n tokens, H hidden size, N query heads, K key heads, D size of a key, E size of a
value.
"""

import copy
import inspect
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import MtpLayer

from decode.base.errors import UserError
from decode.model.cache_names import with_cache
from decode.model.forward.attention_mask import Attend
from decode.model.forward.rotations import Rotation
from decode.model.hidden_states import layer_list_name
from decode.model.pretrained import explained
from heads.layers.llama_layer import Rotary

ATTENTION = "draftsmith_attend"

_attend: ContextVar[Attend] = ContextVar("attend")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention that `run_layer` was given. Same interface as transformers' attention
    functions: query [B, N, n, D], key [B, K, n, D], value [B, K, n, E]; returns [B, n, N, E]."""
    size, values = query.shape[3], value.shape[3]
    if scaling is not None and scaling != size**-0.5:
        query = query * (scaling * size**0.5)
    if values < size:  # in latent attention; kernels want equal sizes
        value = pad(value, (0, size - values))
    outputs = _attend.get()(query, key, value)[..., :values]
    return outputs.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attention)


def mtp_config(model: PreTrainedModel, layers: int) -> Any:
    """The target's text config for `layers` layers of multi-token prediction, counted from 0.

    Kinds of layers that the config does not name are full attention and, in families that name
    kinds of feed-forward networks, experts.
    """
    text = copy.deepcopy(model.config.get_text_config(decoder=True))
    text.num_mtp_layers = layers
    for name, usual in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
        kinds = getattr(text, f"mtp_{name}", None)
        if getattr(text, name, None) is not None and len(kinds or ()) != layers:
            setattr(text, f"mtp_{name}", [usual] * layers)
    config = text.get_mtp_config()
    config._attn_implementation = ATTENTION
    return config


def family_layers(model: PreTrainedModel, config: Any) -> nn.ModuleList:
    """`config.num_hidden_layers` layers, with arbitrary weights.

    Raises UserError for a target whose decoder layers do not take rotary positions as an argument,
    that have no RMS norm, or whose attention does more than softmax(q·k)·v.
    """
    name = layer_list_name(model)
    layers: Any = model.get_submodule(name) if name else None
    block: Any = None if layers is None else type(layers[-1])
    missing = _missing(model, block, config)
    if missing is not None or block is None:
        raise UserError(
            f"mtp heads have a decoder layer of the target's kind, but {type(model).__name__} "
            f"{missing}; train eagle1 or eagle3 heads, whose layer is llama's"
        )
    with explained(f"an mtp layer of {block.__name__} cannot be made"):
        with torch.device("meta"):
            parts = block(config, 0).named_modules()
            norm = next(type(part) for name, part in parts if "norm" in name)
        numbers = range(config.num_hidden_layers)
        return nn.ModuleList(MtpLayer(config, block, norm, number) for number in numbers)


def _missing(model: PreTrainedModel, block: Any, config: Any) -> str | None:
    """What the target lacks, as the end of a sentence. None: nothing."""
    if block is None:
        return "has no single list of layers"
    if "position_embeddings" not in inspect.signature(block.forward).parameters:
        return "has layers without rotary positions"
    if getattr(model.get_decoder(), "rotary_emb", None) is None:
        return "has no rotary positions for all layers"
    if getattr(config, "rms_norm_eps", None) is None:
        return "has no RMS norms"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "limits the scores of its attention (attn_logit_softcapping)"
    if any("sinks" in name for name, _ in model.named_parameters()):
        return "has attention with sinks"
    return None


class FamilyRotary(Rotary):
    """The target's rotary positions."""

    def __init__(self, model: PreTrainedModel, config: Any) -> None:
        rotary: Any = model.get_decoder().rotary_emb
        super().__init__(config, type(rotary))
        parameters = getattr(config, "rope_parameters", None) or {}
        self._by_layer = bool(config.nested_rope_parameter_keys(parameters))
        self._layer_types: Any = getattr(config, "layer_types", None)

    def in_layer(self, layer: int, positions: Tensor, like: Tensor) -> Rotation:
        """As a call, for the kind of a layer."""
        kind = (self._layer_types[layer],) if self._by_layer else ()
        return self(positions, like, *kind)


def run_layer(
    layer: nn.Module,
    embedded: Tensor,
    states: Tensor,
    positions: Tensor,
    position_embeddings: Any,
    attend: Attend,
) -> Tensor:
    """[B, n, H]: the output of a layer after its norm, for embeddings and states [B, n, H]."""
    token = _attend.set(attend)
    try:
        outputs: Tensor = layer(
            embedded,
            states,
            position_embeddings=position_embeddings,
            attention_mask=None,
            position_ids=positions,
            **with_cache(layer, None),
        )
    finally:
        _attend.reset(token)
    return outputs
