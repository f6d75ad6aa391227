"""Rotary positions: the cos and sin of each position, computed once and looked up in every pass.

Shapes: B rows, n tokens fed per row, R rotated numbers of a head, P known positions.
"""

from typing import Any

import torch
from torch import Tensor, nn

from decode.base.device import reads_are_free

# The types whose angles depend on the position alone. Those of others depend on the text's length.
BY_POSITION = ("default", "linear", "llama3", "yarn")


class Rotation:
    """cos and sin of the positions of a pass, [B, n, R] each, as transformers has them."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin
        self._halves: tuple[Tensor, Tensor] | None = None

    @property
    def halves(self) -> tuple[Tensor, Tensor]:
        """cos and sin as [B, n, 1, 2, R/2]. The first half of sin is negated."""
        if self._halves is None:
            cos, sin = (x[:, :, None].unflatten(-1, (2, -1)) for x in (self.cos, self.sin))
            self._halves = cos, torch.cat([-sin[:, :, :, :1], sin[:, :, :, 1:]], 3)
        return self._halves


class Rotations:
    """The rotations of positions that a rotary module of transformers computes.

    On a CPU they are kept for all positions up to the largest so far, if they depend on nothing
    else. Then a pass has one look-up in place of a dozen operations, with the same bits.
    """

    def __init__(self, rotary: nn.Module) -> None:
        self.rotary = rotary
        self._tables: dict[Any, Tensor] = {}  # [P, 2, R] by the type of layer and the dtype

    def of(self, positions: Tensor, like: Tensor, *kind: str) -> tuple[Tensor, Tensor]:
        """cos and sin, [B, n, R] each, in the dtype of `like`. positions: int64 [B, n]. kind: the
        type of layer, for a module that takes it."""
        if self._by_position(*kind) and reads_are_free(positions.device) and positions.numel():
            key, (first, last) = (kind, like.dtype), positions.aminmax()
            table = self._tables.get(key)
            if table is None or table.shape[0] <= last:
                every = torch.arange(max(2 * int(last) + 1, 256), device=positions.device)[None]
                with torch.inference_mode(False), torch.no_grad():  # also for a training
                    table = torch.stack(self.rotary(like, every, *kind), 2)[0]
                self._tables[key] = table
            if first >= 0:
                cos, sin = table[positions].unbind(2)
                return cos, sin
        turns: tuple[Tensor, Tensor] = self.rotary(like, positions, *kind)
        return turns

    def _by_position(self, *kind: str) -> bool:
        """Whether the angles depend on the position alone."""
        types: Any = vars(self.rotary).get("rope_type")
        return (types.get(*kind) if kind and isinstance(types, dict) else types) in BY_POSITION
