"""EAGLE's drafter (2401.15077): it predicts the target's next feature, and a token from it."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss
from transformers import PreTrainedModel

from decode.drafters import DRAFTERS
from decode.target.hidden_states import FINAL
from heads.autoregressive import AutoregressiveDrafter, AutoregressiveHeads
from heads.base import HEADS, Given, HeadOptions, ahead
from heads.layer import Attend, DraftLayer


class Eagle1Options(HeadOptions):
    """Options of EAGLE-1 heads (2401.15077). The token loss is one of the stage's `losses` (the
    paper's w_cls: `forward_kl: 0.1`)."""

    type: Literal["eagle1"] = "eagle1"
    output: Literal["target"] = "target"
    """The output layer: the target's, frozen and not stored."""
    depth: int = Field(7, ge=1)
    """The max depth of a draft, also used to evaluate on dev text. Training uses one step."""
    regression: float = Field(1.0, ge=0)
    """w_reg, the loss weight of the feature loss."""
    noise: float = Field(0.1, ge=0)
    """a; training adds noise from U(−a, a) to the features."""


@HEADS.register("eagle1")
class Eagle1Heads(AutoregressiveHeads):
    """One decoder layer over fc(embedding of the next token ; feature) (section 4.1).

    The layer has no norm before attention. Its output is the next feature. The target's output
    layer reads it. Features are the target's hidden states after its final norm.

    The loss of section 4.2 has two parts: regression · smooth L1 against the target's next feature
    (the mean over the H numbers of a feature), and the stage's losses on the token.

    The paper does not give the init weights. Here fc first copies the feature and the layer changes
    nothing. So each step starts as the target's distribution one token earlier. Tensors have the
    names that engines use.
    """

    Options = Eagle1Options

    def __init__(
        self, options: Eagle1Options, model: PreTrainedModel, vocabulary: Tensor | None = None
    ) -> None:
        super().__init__(options, options.depth, model, vocabulary)
        self.fc = nn.Linear(2 * self.hidden_size, self.hidden_size, bias=False)
        self.layers = nn.ModuleList([DraftLayer(self.config, self.hidden_size)])

    @torch.no_grad()
    def init_weights(self, model: PreTrainedModel) -> None:
        super().init_weights(model)
        layer = self.layers[0]
        assert isinstance(layer, DraftLayer)
        layer.init_weights(self.config.initializer_range)
        self.fc.weight.zero_()
        self.fc.weight[:, self.hidden_size :] = torch.eye(self.hidden_size)

    def loss_weights(self, uniform: float) -> dict[int, float]:
        return {1: 1.0}

    def advance(
        self,
        states: Tensor,
        embedded: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Tensor:
        mixed = self.fc(torch.cat([embedded, states], -1))
        made: Tensor = self.layers[0](mixed, mixed, position_embeddings, attend)
        return made

    def blurred(self, features: Tensor) -> Tensor:
        if not self.training or not self.options.noise:
            return features
        return features + self.options.noise * (2 * torch.rand_like(features) - 1)

    def extra(self, states: Tensor, given: Given, depth: int, places: Tensor) -> Tensor | None:
        if not self.options.regression:
            return None
        wide = torch.promote_types(states.dtype, torch.float32)
        aims = ahead(given.features[FINAL], depth)[places].to(wide)
        off = smooth_l1_loss(states.to(wide), aims, reduction="none")
        return self.options.regression * off.mean(-1).sum()


@DRAFTERS.register("eagle1")
class Eagle1Drafter(AutoregressiveDrafter):
    """EAGLE, in any shape: EAGLE-1 with `static` trees, EAGLE-2 (2406.16858) with `dynamic`."""
