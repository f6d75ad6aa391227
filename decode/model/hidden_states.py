"""Captures the target's hidden states during its forward. Drafters get them as `Features`.

captured_layers: the layers whose hidden states are captured. A layer is `FINAL` for the input of
the output layer, or a layer's number from 0 for the output of that layer. Shapes: B rows, n tokens,
H hidden size, T captured layers.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.base.errors import UserError
from decode.model.pretrained import decoder_config, has_encoder, input_device

FINAL = -1


def captured_modules(
    model: PreTrainedModel, captured_layers: Sequence[int]
) -> dict[int, nn.Module]:
    """The module whose output is the hidden state, for each layer. For `FINAL` of a model with an
    encoder it is the output layer, whose input is the hidden state. Raises UserError for a layer
    the model does not have."""
    return {
        layer: _last(model) if layer == FINAL else _layer(model, layer) for layer in captured_layers
    }


def _last(model: PreTrainedModel) -> nn.Module:
    # A decoder under an encoder may scale its states before the output layer.
    last: nn.Module = model.get_output_embeddings() if has_encoder(model) else model.base_model
    # BART's causal models call the decoder in their base model, and not the base model.
    last = getattr(last, "decoder", last)
    if last is model:
        raise UserError(f"{type(model).__name__} has no stack of layers below its output layer")
    return last


class Recorder:
    """Captures the hidden states of a model's forwards with hooks. Works with any causal LM and
    does not change the forward. Captures every fed token, even if only some get logits.

    Raises UserError for a layer the model does not have.
    """

    def __init__(self, model: PreTrainedModel, captured_layers: Sequence[int]) -> None:
        self._modules = captured_modules(model, captured_layers)
        self._device, self._reads_input = input_device(model), has_encoder(model)

    @contextmanager
    def recording(self) -> Iterator[dict[int, Tensor]]:
        """Captures the forward inside this context: the hidden states of each layer, [B, n, H]."""
        captured: dict[int, Tensor] = {}
        # Hooks that stay would affect other users of the model.
        with ExitStack() as hooks:
            for layer, module in self._modules.items():
                store: Any = partial(_store, captured, layer, self._device)
                if layer == FINAL and self._reads_input:
                    hooks.enter_context(module.register_forward_pre_hook(store))
                else:
                    hooks.enter_context(module.register_forward_hook(store))
            yield captured


def _store(
    captured: dict[int, Tensor],
    layer: int,
    device: torch.device,
    _: nn.Module,
    inputs: Any,
    output: Any = None,
) -> None:
    """A hook. Before its module it stores the input, after it the output."""
    states = inputs if output is None else output
    # Layers may be on other devices than the inputs.
    captured[layer] = (states if isinstance(states, Tensor) else states[0]).to(device)


def _layer(model: PreTrainedModel, number: int) -> nn.Module:
    depth = decoder_config(model).num_hidden_layers
    if not 0 <= number < depth:
        raise UserError(
            f"hidden states of layer {number} were requested, but {type(model).__name__} has "
            f"{depth} layers; expected 0 to {depth - 1}, or {FINAL} for the output layer's input"
        )
    name = layer_list_name(model)
    if name is None:
        raise UserError(
            f"{type(model).__name__} has no single list of its {depth} layers, so the hidden "
            "states between them cannot be captured"
        )
    layers = model.get_submodule(name)
    assert isinstance(layers, nn.ModuleList)
    return layers[number]


def layer_list_name(model: PreTrainedModel) -> str | None:
    """The dotted name of the list that holds the model's layers, such as `model.layers`. None if
    there is not exactly one such list."""
    depth, encoder = decoder_config(model).num_hidden_layers, set[nn.Module]()
    if has_encoder(model):
        encoder = set(model.get_encoder().modules())
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth and module not in encoder
    ]
    outermost = [name for name in names if not any(name.startswith(f"{o}.") for o in names)]
    return outermost[0] if len(outermost) == 1 else None
