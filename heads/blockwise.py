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
    """k: the block size. p₁ is the target itself, so k − 1 heads are made. hidden: width of the
    hidden layer, for each of them; None: that of the target's feed-forward layers. sub_loss: each
    minibatch trains one head, drawn uniformly, as in the paper, or the mean over all."""

    type: Literal["blockwise"] = "blockwise"
    output: Literal["shared", "target"] = "target"
    k: int = Field(8, ge=2)
    hidden: int | None = Field(None, ge=1)
    sub_loss: Literal["random", "mean"] = "random"


@HEADS.register("blockwise")
class BlockwiseHeads(ParallelHeads):
    """p₂ … p_k: a feed-forward layer from the target's state to (k − 1)·H, to each part of which
    the state itself is added, under the vocabulary projection that all share. Its second half
    starts as 0, so that all heads start as p₁, the target."""

    Options = BlockwiseOptions

    def __init__(
        self, options: BlockwiseOptions, model: PreTrainedModel, vocabulary: Tensor | None = None
    ) -> None:
        super().__init__(options, options.k - 1, model, vocabulary)
        # The mean over p₁ … p_k weighs the target's loss as each of the k − 1 others'; their own
        # weights, or their chances to be drawn, add up to 1.
        self.joint_weight = float(self.depth)
        width = options.hidden or feed_forward_size(model.config.get_text_config())
        self.up = nn.Linear(self.hidden_size, self.depth * width)
        self.down = nn.Linear(self.depth * width, self.depth * self.hidden_size)

    @torch.no_grad()
    def start_from(self, model: PreTrainedModel) -> None:
        super().start_from(model)
        self.up.reset_parameters()
        for parameter in self.down.parameters():
            parameter.zero_()

    def sub_losses(self, uniform: float) -> dict[int, float]:
        if self.options.sub_loss == "random":
            return {1 + int(uniform * self.depth): 1.0}
        return dict.fromkeys(range(1, self.depth + 1), 1 / self.depth)

    def states(self, features: Tensor, depths: Sequence[int]) -> Tensor:
        made = self.down(self.up(features).relu()).unflatten(-1, (self.depth, self.hidden_size))
        return features[:, None] + made[:, [depth - 1 for depth in depths]]


@DRAFTERS.register("blockwise")
class BlockwiseDrafter(ParallelHeadsDrafter):
    """Blockwise's heads; a chain is the paper's block."""
