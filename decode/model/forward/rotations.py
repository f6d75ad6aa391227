"""Rotary positions: the cos and sin of each position, computed once and looked up in every pass.

Shapes: B rows, n tokens fed per row, R rotated numbers of a head, P known positions.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from decode.base.device import reads_are_free

# The types whose angles depend on the position alone. Those of others depend on the text's length.
BY_POSITION = ("default", "linear", "llama3", "yarn")


class Rotation:
    """cos and sin of the positions of a pass, [B, n, R] each, as transformers has them.

    They are given so, or by tables [P, R] of both and `places`, int64 [B or 1, n], the row of each
    token in them. Layers in C++ read the tables.
    """

    def __init__(self, cos: Tensor, sin: Tensor, places: Tensor | None = None) -> None:
        self._tables, self._places = (cos, sin), places
        self._turns = None if places is not None else (cos, sin)
        self._halves: tuple[Tensor, Tensor] | None = None
        self.dtype = cos.dtype

    def __iter__(self) -> Iterator[Tensor]:
        if self._turns is None:
            cos, sin = self._tables
            self._turns = cos[self._places], sin[self._places]
        return iter(self._turns)

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tables of cos and sin, and `places`."""
        if self._places is None:
            cos, sin = self._tables
            self._tables = cos.flatten(0, 1).contiguous(), sin.flatten(0, 1).contiguous()
            self._places = torch.arange(cos[..., 0].numel()).view(cos.shape[:2])
        return *self._tables, self._places

    def _halved(self) -> tuple[Tensor, Tensor]:
        """cos and sin as [B, n, 1, 2, R/2]. The first half of sin is negated."""
        if self._halves is None:
            cos, sin = (x[:, :, None].unflatten(-1, (2, -1)) for x in self)
            self._halves = cos, torch.cat([-sin[:, :, :, :1], sin[:, :, :, 1:]], 3)
        return self._halves

    def rotated(self, heads: Tensor) -> Tensor:
        """heads: [B, n, N, D]. The first R numbers of each head are rotated."""
        cos, sin = self._halved()
        size = 2 * cos.shape[4]
        halves = (heads if size == heads.shape[3] else heads[..., :size]).unflatten(-1, (2, -1))
        # Some models have cos and sin in float32.
        rotated = torch.addcmul(halves * cos, halves.flip(-2), sin).flatten(-2).to(heads.dtype)
        return rotated if size == heads.shape[3] else torch.cat([rotated, heads[..., size:]], -1)


class Rotations:
    """The rotations of positions that a rotary module of transformers computes.

    On a CPU they are kept for all positions up to the largest so far, if they depend on nothing
    else. Then a pass has one look-up in place of a dozen operations, with the same bits.
    """

    def __init__(self, rotary: nn.Module) -> None:
        self.rotary = rotary
        # cos and sin, [P, R] each, by the type of layer and the dtype.
        self._tables: dict[Any, tuple[Tensor, Tensor]] = {}

    def of(self, positions: Tensor, like: Tensor, *kind: str) -> Rotation:
        """cos and sin in the dtype of `like`. positions: int64 [B, n]. kind: the type of layer, for
        a module that takes it."""
        key = kind, like.dtype
        table, free = self._tables.get(key), reads_are_free(positions.device)
        if free and (table is not None or self._by_position(*kind)) and 0 not in positions.shape:
            first, last = map(int, positions.aminmax())
            if table is None or table[0].shape[0] <= last:  # `len` takes longer
                every = torch.arange(max(2 * last + 1, 256), device=positions.device)[None]
                with torch.inference_mode(False), torch.no_grad():  # also for a training
                    cos, sin = self.rotary(like, every, *kind)
                    table = self._tables[key] = cos[0].contiguous(), sin[0].contiguous()
            if first >= 0:
                return Rotation(*table, positions)
        return Rotation(*self.rotary(like, positions, *kind))

    def _by_position(self, *kind: str) -> bool:
        """Whether the angles depend on the position alone."""
        types: Any = vars(self.rotary).get("rope_type")
        return (types.get(*kind) if kind and isinstance(types, dict) else types) in BY_POSITION
