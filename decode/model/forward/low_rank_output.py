"""Output layers of low rank (SlimSpec, 2605.10453): states [H] → rank r → V' rows.

One has r·(H + V') weights in place of H·V', and a level of a draft reads as many.
"""

import torch
from torch import Tensor, nn

from decode.base.errors import UserError
from decode.model.forward.lean_parts import PackedLinear


class LowRankLinear(nn.Linear):
    """The factors `down`, [r, H], and `up`, [V', r], in place of an output layer of V' rows like
    `layer`. `weight` and `bias` are those of the full layer that computes the same. Raises
    UserError for a rank that saves no weights."""

    def __init__(self, layer: nn.Linear, rows: int, rank: int) -> None:
        nn.Module.__init__(self)  # that of a linear layer would make a full weight
        size = layer.in_features
        self.in_features, self.out_features = size, rows
        if rank * (rows + size) >= rows * size:
            raise UserError(
                f"output_rank is {rank}: factors of that rank are no smaller than the output layer "
                f"[{rows}, {size}]; expected a lower rank, or none"
            )
        self.down = nn.Linear(size, rank, bias=False)
        self.up = nn.Linear(rank, rows, bias=layer.bias is not None)

    def forward(self, states: Tensor) -> Tensor:
        """[..., V'] for states [..., H]."""
        logits: Tensor = self.up(self.down(states))
        return logits

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.up.weight @ self.down.weight

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        return self.up.bias


def output_product(layer: nn.Linear) -> nn.Module:
    """The product of an output layer (`decode.model.forward.lean_parts`), or of both factors."""
    if isinstance(layer, LowRankLinear):
        return nn.Sequential(PackedLinear(layer.down), PackedLinear(layer.up))
    return PackedLinear(layer)


def factors(weight: Tensor, rank: int) -> list[Tensor]:
    """[r, H] and [V', r], whose product is the nearest of this rank to a weight [V', H]: its
    truncated SVD, by the eigenvectors of WᵀW, which is the smaller matrix."""
    wide = weight.float()
    vectors = torch.linalg.eigh(wide.T @ wide).eigenvectors[:, -rank:]
    return [vectors.T, wide @ vectors]


@torch.no_grad()
def expand(layers: nn.ModuleList) -> None:
    """Replace layers of low rank with the full layers that compute the same."""
    for place, layer in enumerate(layers):
        if isinstance(layer, LowRankLinear):
            size, rows = layer.in_features, layer.out_features
            full = nn.Linear(size, rows, bias=layer.bias is not None, device="meta")
            full.weight, full.bias = nn.Parameter(layer.weight, requires_grad=False), layer.up.bias
            layers[place] = full
