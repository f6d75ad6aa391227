"""EAGLE-3 (2503.01840): heads that read features of several layers and train on their own states.

Shapes: B rows, n tokens, F features of a token, H hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from heads.autoregressive_heads import EagleHeads
from heads.heads_module import HEADS
from heads.layers.llama_layer import Attend, DraftLayer, init_layer
from heads.layers.target_layers import captured_outputs, copy_norm
from heads.options import Eagle3Options


class Eagle3Layer(DraftLayer):
    """Attention reads the normed embedding and the normed state, concatenated."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


@HEADS.register("eagle3")
class Eagle3Heads(EagleHeads):
    """fc fuses the features of three layers into one state (section 3.1).

    The decoder layer computes the next state from this state and the embedding of the next token.
    Later steps read these states unchanged. The output layer reads them through a norm. There is no
    loss on features, only on tokens.

    The paper does not give the init weights. Here fc copies the feature of the highest of the three
    layers, the decoder layer changes nothing, and norm and output layer are the target's. So the
    heads start as the target without its last layers. Tensors have the names that engines use,
    except the output layer: `output.layers.0` here, `lm_head` in engines.

    EAGLE-3.1 is `fc_norm` and `norm_output`: the scale of the states then stays the same from step
    to step.
    """

    def __init__(
        self, options: Eagle3Options, model: PreTrainedModel, vocabulary: Tensor | None = None
    ) -> None:
        super().__init__(options, options.steps, model, vocabulary)
        layers = model.config.get_text_config().num_hidden_layers
        self.captured_layers = captured_outputs(options.captured_layers, layers)
        size = self.hidden_size
        read = len(self.captured_layers) * size
        self.fc = nn.Linear(read, size, bias=False)
        if options.norm_before_fc:
            self.input_norm = LlamaRMSNorm(read, eps=self.config.rms_norm_eps)
        self.fc_norm = nn.ModuleList(
            LlamaRMSNorm(size, eps=self.config.rms_norm_eps)
            for _ in (self.captured_layers if options.fc_norm else ())
        )
        self.midlayer = Eagle3Layer(self.config)
        self.norm = LlamaRMSNorm(size, eps=self.config.rms_norm_eps)

    @torch.no_grad()
    def init_weights(self, model: PreTrainedModel) -> None:
        super().init_weights(model)
        init_layer(self.midlayer, self.config.initializer_range)
        self.fc.weight.zero_()
        self.fc.weight[:, -self.hidden_size :] = torch.eye(self.hidden_size)
        norms: Any = self.fc_norm
        for norm in norms:
            norm.weight.fill_(1.0)
        if self.options.norm_before_fc:
            self.input_norm.weight.fill_(1.0)
        copy_norm(self.norm, model)

    def fuse(self, features: Tensor) -> Tensor:
        if self.options.norm_before_fc:
            features = self.input_norm(features)
        if len(self.fc_norm):
            taps = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(x) for norm, x in zip(self.fc_norm, taps, strict=True)], -1)
        fused: Tensor = self.fc(features)
        return fused

    def step(
        self,
        states: Tensor,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        read: Tensor | None = None,
    ) -> Tensor:
        dtype = self.dtype  # under autocast a norm returns float32
        states, embedded = states.to(dtype), self.embeddings(tokens).to(dtype)
        layer = self.midlayer
        normed = layer.hidden_norm(states)
        inputs = torch.cat([layer.input_layernorm(embedded), normed], -1)
        residual = normed if self.options.norm_before_residual else states
        next_states: Tensor = layer(residual, inputs, self._rotary(positions, states), attend, read)
        return self.norm(next_states) if self.options.norm_output else next_states

    def readout(self, states: Tensor) -> Tensor:
        return states if self.options.norm_output else self.norm(states)
