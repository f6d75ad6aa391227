"""Output layers of heads: from states to logits over the vocabulary, or a reduced one.

Shapes: H hidden size, V' rows (draft vocabulary), D heads.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

Outputs = Literal["own", "shared", "target"]


class HeadOutput(nn.Module):
    """own: one layer for each head; shared: one for all of them; target: the target's own layer,
    which is no parameter of this module."""

    def __init__(self, kind: Outputs, depth: int, layer: nn.Linear, rows: int) -> None:
        super().__init__()
        count = {"own": depth, "shared": 1, "target": 0}[kind]
        bias = layer.bias is not None
        self.layers = nn.ModuleList(
            nn.Linear(layer.in_features, rows, bias=bias) for _ in range(count)
        )
        self._borrowed: tuple[Tensor, Tensor | None] | None = None

    def start_from(self, layer: nn.Linear, vocabulary: Tensor | None) -> None:
        """Copy the target's rows into every layer."""
        weight, bias = _rows(layer, vocabulary)
        for own in self.layers:
            assert isinstance(own, nn.Linear)
            own.weight.copy_(weight)
            if bias is not None:
                own.bias.copy_(bias)

    def borrow(
        self, layer: nn.Linear, vocabulary: Tensor | None, dtype: torch.dtype | None
    ) -> None:
        if not len(self.layers):
            weight, bias = _rows(layer, vocabulary)
            dtype = dtype or weight.dtype
            self._borrowed = weight.to(dtype), None if bias is None else bias.to(dtype)

    def of(self, depth: int) -> tuple[Tensor, Tensor | None]:
        """Weight [V', H] and bias [V'] of the head at depth 1, 2, …"""
        if not len(self.layers):
            assert self._borrowed is not None, "the target's layer is borrowed first"
            return self._borrowed
        layer = self.layers[depth - 1 if len(self.layers) > 1 else 0]
        assert isinstance(layer, nn.Linear)
        return layer.weight, layer.bias

    def logits(self, states: Tensor) -> Tensor:
        """[B, d, V'] of states [B, d, H], one for each of the first d heads."""
        if len(self.layers) <= 1:
            return linear(states, *self.of(1))
        depths = range(1, states.shape[1] + 1)
        return torch.stack([linear(states[:, d - 1], *self.of(d)) for d in depths], 1)


def _rows(layer: nn.Linear, vocabulary: Tensor | None) -> tuple[Tensor, Tensor | None]:
    weight = layer.weight.detach()
    bias = None if layer.bias is None else layer.bias.detach()
    if vocabulary is None:
        return weight, bias
    ids = vocabulary.to(weight.device)
    return weight[ids], None if bias is None else bias[ids]
