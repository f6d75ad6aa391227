"""EAGLE's decoder layer as a copy of the target's last layer, in place of random weights.

A llama layer of the target and the layer of EAGLE's heads have the same parts. The copy computes on
the states of the heads what the target's last layer computes on its own.

EAGLE-3's state is the residual stream, so all parts are copied as they are: the attention reads the
normed state as in the target, and nothing of the embedding at first.

EAGLE-1's state is a feature f, the residual stream h after the target's final norm: f = g ⊙ h / r,
with the norm's scale g and the size r of h. So what reads h is divided by g, and what is written
is multiplied with g and divided by r, which is measured on a text. (A norm of f divides by the size
of g ⊙ h, which is about that of g times that of h.)

Shapes: H hidden size, n tokens.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.base.errors import UserError
from decode.model.forward.recognition import is_wrapped
from decode.model.hidden_states import layer_list_name
from heads.eagle1_heads import Eagle1Heads
from heads.eagle3_heads import Eagle3Heads
from heads.heads_module import Heads
from heads.layers.target_layers import norm_scale

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUTPUTS = ("self_attn.o_proj", "mlp.down_proj")
BEFORE, BETWEEN = "input_layernorm", "post_attention_layernorm"


def require_last_layer(heads: Heads, model: PreTrainedModel, *, stage: str) -> None:
    """Raise UserError unless the layer of these heads can start as the target's last layer. The
    heads and the target may have no weights yet. stage: the stage's name, for messages."""
    if not isinstance(heads, Eagle1Heads | Eagle3Heads):
        raise UserError(
            f"stage {stage}: copy_last_layer is for eagle1 and eagle3 heads, but these are "
            f"{heads.options.type} heads; leave it out"
        )
    kind, layers, own = type(model).__name__, _layers(model), _own_layer(heads)
    final = type(getattr(model.base_model, "norm", None)).__name__
    activation = getattr(model.config.get_text_config(), "hidden_act", None)
    if not layers or is_wrapped(model) or not final.endswith("RMSNorm") or activation != "silu":
        raise UserError(
            f"stage {stage}: copy_last_layer needs a target with one list of layers, SiLU, a final "
            f"RMS norm and plain weights, but {kind} is of another kind; leave it out"
        )
    found = {part: [*weight.shape] for part, weight in layers[-1].named_parameters()}
    expected = {part: [*weight.shape] for part, weight in own.named_parameters()}
    expected.pop("hidden_norm.weight", None)
    for part in (f"{part}.weight" for part in QKV):
        expected[part] = [expected[part][0], heads.hidden_size]
    expected[f"{BEFORE}.weight"] = [heads.hidden_size]
    for part in sorted(found | expected):
        if found.get(part) != expected.get(part):
            shown = [f"{part} {x[part]}" if part in x else "nothing" for x in (found, expected)]
            raise UserError(
                f"stage {stage}: copy_last_layer needs a layer with the parts and sizes of the "
                f"heads' own. The last layer of {kind} has {shown[0]}; expected {shown[1]}. If "
                "heads.layer is set, leave it out; else leave copy_last_layer out"
            )


@torch.no_grad()
def copy_last_layer(heads: Heads, model: PreTrainedModel, text: Tensor) -> None:
    """Start the layer of new heads as the target's last layer. text: int64 [1, n], on which the
    size of the target's states is measured. `require_last_layer` says for which heads and
    targets."""
    base: Any = model.base_model
    last, own, size = _layers(model)[-1], _own_layer(heads), heads.hidden_size

    def given(part: str) -> Tensor:
        weight: Tensor = last.get_submodule(part).weight.detach()
        return weight.float().to(own.mlp.down_proj.weight.device)

    before, between, final = (
        norm_scale(norm, size, model).float().to(own.mlp.down_proj.weight.device)
        for norm in (last.get_submodule(BEFORE), last.get_submodule(BETWEEN), base.norm)
    )
    scale = torch.ones_like(final)
    if isinstance(heads, Eagle1Heads):
        scale = final / _stream_size(model, text)
        between = between * final.square().mean().sqrt() / final
    else:
        own.hidden_norm.weight.copy_(before)
    own.get_submodule(BETWEEN).weight.copy_(between)
    for part in QKV:
        weight = own.get_submodule(part).weight
        if isinstance(heads, Eagle1Heads):
            weight.copy_(given(part) * (before / final))
        else:  # the embedding comes first
            weight.copy_(torch.cat([torch.zeros_like(given(part)), given(part)], 1))
    for part in OUTPUTS:
        own.get_submodule(part).weight.copy_(scale[:, None] * given(part))
    for part in ("mlp.gate_proj", "mlp.up_proj"):
        own.get_submodule(part).weight.copy_(given(part))


def _stream_size(model: PreTrainedModel, text: Tensor) -> float:
    """r: the root mean square of the residual stream before the final norm, the median of a text's
    tokens. The first token's can be many times as large."""
    base: Any = model.base_model
    found: list[Tensor] = []
    handle = base.norm.register_forward_pre_hook(lambda norm, inputs: found.append(inputs[0]))
    try:
        model(text.to(model.device))
    finally:
        handle.remove()
    return float(found[0].float().square().mean(-1).sqrt().median())


def _layers(model: PreTrainedModel) -> Any:
    name = layer_list_name(model)
    return model.get_submodule(name) if name is not None else ()


def _own_layer(heads: Heads) -> Any:
    return heads.layers[0] if isinstance(heads, Eagle1Heads) else heads.get_submodule("midlayer")
