"""Blockwise parallel decoding's heads (1811.03115, section 5): one hidden layer for all of them."""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.drafters import DRAFTERS
from heads.base import HEADS, HeadOptions, feed_forward_size
from heads.independent import ParallelHeads, ParallelHeadsDrafter


class BlockwiseOptions(HeadOptions):
    """Options of blockwise heads (1811.03115)."""

    type: Literal["blockwise"] = "blockwise"
    output: Literal["shared", "target"] = "target"
    """The output layer of all heads. `shared`: starts as a copy of the target's output layer and is
    trained. `target`: the target's output layer itself, frozen and not stored."""
    k: int = Field(8, ge=2)
    """The block size. p₁ is the target itself, so there are k − 1 heads."""
    hidden: int | None = Field(None, ge=1)
    """The width of the hidden layer per head. None: the width of the target's feed-forward
    layers."""
    sub_loss: Literal["random", "mean"] = "random"
    """The loss of a minibatch. `random`: the loss of one head, drawn uniformly, as in the paper.
    `mean`: the mean over all heads."""


@HEADS.register("blockwise")
class BlockwiseHeads(ParallelHeads):
    """p₂ … p_k: one feed-forward network maps the target's state to (k − 1)·H numbers.

    The state itself is added to each part of size H. All heads share the vocabulary projection. The
    second linear layer starts as 0, so all heads start as p₁, the target.
    """

    Options = BlockwiseOptions

    def __init__(
        self, options: BlockwiseOptions, model: PreTrainedModel, vocabulary: Tensor | None = None
    ) -> None:
        super().__init__(options, options.k - 1, model, vocabulary)
        # The mean over p₁ … p_k gives the target's loss the same weight as each of the k − 1 heads.
        # The heads' loss weights, or their probabilities to be drawn, sum to 1.
        self.joint_weight = float(self.depth)
        width = options.hidden or feed_forward_size(model.config.get_text_config())
        self.up = nn.Linear(self.hidden_size, self.depth * width)
        self.down = nn.Linear(self.depth * width, self.depth * self.hidden_size)

    @torch.no_grad()
    def init_weights(self, model: PreTrainedModel) -> None:
        super().init_weights(model)
        self.up.reset_parameters()
        for parameter in self.down.parameters():
            parameter.zero_()

    def loss_weights(self, uniform: float) -> dict[int, float]:
        if self.options.sub_loss == "random":
            return {1 + int(uniform * self.depth): 1.0}
        return dict.fromkeys(range(1, self.depth + 1), 1 / self.depth)

    def states(self, features: Tensor, depths: Sequence[int]) -> Tensor:
        made = self.down(self.up(features).relu()).unflatten(-1, (self.depth, self.hidden_size))
        return features[:, None] + made[:, [depth - 1 for depth in depths]]


@DRAFTERS.register("blockwise")
class BlockwiseDrafter(ParallelHeadsDrafter):
    """Drafts with blockwise heads. A chain is the block of the paper."""
