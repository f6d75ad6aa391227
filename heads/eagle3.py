"""EAGLE-3's drafter (2503.01840): reads features of several layers, trains on its own states.

Shapes: B rows, n tokens, H hidden size.
"""

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from decode.drafters import DRAFTERS
from decode.errors import UserError
from heads.autoregressive import AutoregressiveDrafter, AutoregressiveHeads
from heads.base import HEADS, HeadOptions
from heads.layer import Attend, DraftLayer


class Eagle3Options(HeadOptions):
    """Options of EAGLE-3 heads (2503.01840). The losses are the stage's `losses`; the paper trains
    on the target's distribution, `forward_kl: 1`."""

    type: Literal["eagle3"] = "eagle3"
    output: Literal["shared", "target"] = "shared"
    """The output layer. `shared`: one separate layer that starts as a copy of the target's and is
    trained. `target`: the target's output layer itself, frozen and not stored."""
    steps: int = Field(7, ge=1)
    """The number of steps of the training-time test, and the max depth of a draft. Each step reads
    the states of the previous step."""
    decay: float = Field(0.8, gt=0, le=1)
    """The loss weight of step k is decay^(k − 1)."""


def tapped_layers(layers: int) -> tuple[int, int, int]:
    """Return the layers captured of a target with n layers: the inputs of layers 2, n // 2 and n −
    3.

    Layers are counted from 0. The input of a layer is the output of the layer before it, so the
    returned numbers are one lower. vLLM, SGLang and llama.cpp use the same default if a drafter's
    config names no layers.

    Raises UserError if these three layers are not distinct and in ascending order.

    >>> tapped_layers(30)
    (1, 14, 26)
    """
    low, middle, high = 2, layers // 2, layers - 3
    if not low < middle < high:
        raise UserError(
            f"EAGLE-3 reads what the target's layers 2, n // 2 and n − 3 are given, and with "
            f"{layers} layers these are {low}, {middle} and {high}; expected a target with at "
            "least 7 layers. Train eagle1 heads instead"
        )
    return low - 1, middle - 1, high - 1


class Eagle3Layer(DraftLayer):
    """Attention reads the normed embedding and the normed state, concatenated."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @torch.no_grad()
    def init_weights(self, spread: float) -> None:
        super().init_weights(spread)
        self.input_layernorm.weight.fill_(1.0)
        self.hidden_norm.weight.fill_(1.0)


@HEADS.register("eagle3")
class Eagle3Heads(AutoregressiveHeads):
    """fc fuses the features of three layers into one state (section 3.1).

    The decoder layer computes the next state from this state and the embedding of the next token.
    Later steps read these states unchanged. The output layer reads them through a norm. There is no
    loss on features, only on tokens.

    The paper does not give the init weights. Here fc copies the feature of the highest of the three
    layers, the decoder layer changes nothing, and norm and output layer are the target's. So the
    heads start as the target without its last layers. Tensors have the names that engines use,
    except the output layer: `output.layers.0` here, `lm_head` in engines.
    """

    Options = Eagle3Options

    def __init__(
        self, options: Eagle3Options, model: PreTrainedModel, vocabulary: Tensor | None = None
    ) -> None:
        super().__init__(options, options.steps, model, vocabulary)
        self.captured_layers = tapped_layers(model.config.get_text_config().num_hidden_layers)
        size = self.hidden_size
        self.fc = nn.Linear(len(self.captured_layers) * size, size, bias=False)
        self.midlayer = Eagle3Layer(self.config)
        self.norm = LlamaRMSNorm(size, eps=self.config.rms_norm_eps)

    @torch.no_grad()
    def init_weights(self, model: PreTrainedModel) -> None:
        super().init_weights(model)
        self.midlayer.init_weights(self.config.initializer_range)
        self.fc.weight.zero_()
        self.fc.weight[:, -self.hidden_size :] = torch.eye(self.hidden_size)
        self.norm.weight.fill_(1.0)
        own: Any = getattr(model.base_model, "norm", None)
        if type(own).__name__.endswith("RMSNorm"):
            # Its output for ones is its scale, also for norms that add 1 to the stored weight.
            ones = torch.ones(1, self.hidden_size, dtype=model.dtype, device=model.device)
            self.norm.weight.copy_(own(ones)[0])

    def loss_weights(self, uniform: float) -> dict[int, float]:
        return {k: self.options.decay ** (k - 1) for k in range(1, self.depth + 1)}

    def fuse(self, features: Tensor) -> Tensor:
        fused: Tensor = self.fc(features)
        return fused

    def advance(
        self,
        states: Tensor,
        embedded: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Tensor:
        layer = self.midlayer
        read = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(states)], -1)
        made: Tensor = layer(states, read, position_embeddings, attend)
        return made

    def readout(self, states: Tensor) -> Tensor:
        normed: Tensor = self.norm(states)
        return normed


@DRAFTERS.register("eagle3")
class Eagle3Drafter(AutoregressiveDrafter):
    """EAGLE-3, in any shape. The paper uses EAGLE-2's trees, `dynamic`."""
