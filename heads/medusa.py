"""Medusa's heads (2401.10774): each head is a few residual blocks and an output layer."""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedModel

from decode.drafters import DRAFTERS
from heads.base import HEADS, HeadOptions
from heads.independent import ParallelHeads, ParallelHeadsDrafter


class MedusaOptions(HeadOptions):
    """Options of Medusa heads (2401.10774)."""

    type: Literal["medusa"] = "medusa"
    heads: int = Field(5, ge=1)
    """K, the number of heads."""
    layers: int = Field(1, ge=1)
    """The number of residual blocks per head."""
    decay: float = Field(0.8, gt=0, le=1)
    """λ; the loss weight of head k is λᵏ."""


class _Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + silu(self.linear(x))


@HEADS.register("medusa")
class MedusaHeads(ParallelHeads):
    """Head k is softmax(W₂ · (SiLU(W₁·h) + h)), equation 1.

    W₁ starts as 0 and W₂ as the target's output layer. So every head starts as the target's
    next-token distribution.
    """

    Options = MedusaOptions
    joint_weight = 0.2

    def __init__(
        self, options: MedusaOptions, model: PreTrainedModel, vocabulary: Tensor | None = None
    ) -> None:
        super().__init__(options, options.heads, model, vocabulary)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(_Block(self.hidden_size) for _ in range(options.layers)))
            for _ in range(options.heads)
        )

    @torch.no_grad()
    def init_weights(self, model: PreTrainedModel) -> None:
        super().init_weights(model)
        for parameter in self.blocks.parameters():
            parameter.zero_()

    def loss_weights(self, uniform: float) -> dict[int, float]:
        return {k: self.options.decay**k for k in range(1, self.depth + 1)}

    def states(self, features: Tensor, depths: Sequence[int]) -> Tensor:
        return torch.stack([self.blocks[depth - 1](features) for depth in depths], 1)


@DRAFTERS.register("medusa")
class MedusaDrafter(ParallelHeadsDrafter):
    """Drafts with Medusa heads, in any shape. The paper calibrates a static tree on a dev set."""
