"""EAGLE-1 (2401.15077): heads that predict the target's next feature, and a token from it.

Shapes: B rows, n tokens, H hidden size.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss
from transformers import PreTrainedModel

from decode.model.hidden_states import FINAL
from distill.chunked_loss import at_least_float32
from distill.row_numbers import row_numbers
from heads.autoregressive_heads import EagleHeads
from heads.heads_module import HEADS, HeadBatch, Prediction, shift_left
from heads.layers.llama_layer import Attend, DraftLayer, init_layer
from heads.options import Eagle1Options


@HEADS.register("eagle1")
class Eagle1Heads(EagleHeads):
    """One decoder layer over fc(embedding of the next token ; feature) (section 4.1).

    The layer has no norm before attention. Its output is the next feature. The target's output
    layer reads it. Features are the target's hidden states after its final norm.

    The loss of section 4.2 has two parts: regression · smooth L1 against the target's next feature
    (the mean over the H numbers of a feature), and the stage's losses on the token.

    The paper does not give the init weights. Here fc first copies the feature and the layer changes
    nothing. So each step starts as the target's distribution one token earlier. Tensors have the
    names that engines use.
    """

    computed_once = ""

    def __init__(
        self, options: Eagle1Options, model: PreTrainedModel, vocabulary: Tensor | None = None
    ) -> None:
        super().__init__(options, options.longest_draft, model, vocabulary)
        self.batch_parts = options.steps
        self.fc = nn.Linear(2 * self.hidden_size, self.hidden_size, bias=options.bias)
        self.layers = nn.ModuleList([DraftLayer(self.config, self.hidden_size)])

    @torch.no_grad()
    def init_weights(self, model: PreTrainedModel) -> None:
        super().init_weights(model)
        init_layer(self.layers[0], self.config.initializer_range)
        self.fc.weight.zero_()
        self.fc.weight[:, self.hidden_size :] = torch.eye(self.hidden_size)
        if self.options.bias:
            self.fc.bias.zero_()

    def loss_weights(self, uniform: float) -> dict[int, float]:
        return dict.fromkeys(range(1, self.batch_parts + 1), 1.0)

    def step(
        self,
        states: Tensor,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        read: Tensor | None = None,
    ) -> Tensor:
        embedded = self.embeddings(tokens).to(states.dtype)
        turns = self._rotary(positions, states)
        mixed = self.fc(torch.cat([embedded, states], -1))
        (layer,) = self.layers
        next_states: Tensor = layer(mixed, mixed, turns, attend, read)
        return next_states

    def inputs_of(self, batch: HeadBatch) -> Tensor:
        states = super().inputs_of(batch)
        # A draft that is replayed was made from states without noise.
        return self.with_noise(states) if batch.inputs is None else states

    def with_noise(self, features: Tensor) -> Tensor:
        """[B, T, H]: the features that a training reads."""
        if not self.training or not self.options.noise:
            return features
        rows, length, size = features.shape
        dtype, device = features.dtype, features.device
        uniform = row_numbers(rows, length * size, device=device, dtype=dtype).view_as(features)
        return features + self.options.noise * (2 * uniform - 1)

    def predictions(self, batch: HeadBatch, depths: Sequence[int]) -> Iterator[Prediction]:
        for prediction in super().predictions(batch, depths):
            if self.options.regression:
                states = prediction.states.to(at_least_float32(prediction.states.dtype))
                features = shift_left(batch.features[FINAL], prediction.depth)
                features = prediction.of(features).to(states.dtype)
                losses = smooth_l1_loss(states, features, reduction="none")
                prediction.extra_loss = self.options.regression * losses.mean(-1)
            yield prediction
