"""Rows with different sampling parameters in one pass.

Shapes: B rows, V vocabulary. The first dimension of all tensors is the row.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from decode.base.device import to_device
from decode.draw.penalties import Penalties
from decode.draw.sampling import Sampling
from decode.draw.top import argmax

_OF_NO_ROW = Sampling()


def combined(settings: Sequence[Sampling], kinds: np.ndarray) -> Sampling:
    """The sampling of rows, row b with settings[kinds[b]], int [B]. If all are equal, it is the
    plain one."""
    distinct = list(dict.fromkeys(settings))
    if len(distinct) > 1:
        places = {one: place for place, one in enumerate(distinct)}
        kinds = np.array([places[one] for one in settings])[kinds]
        used = np.unique(kinds)
        if len(used) > 1:
            return MixedSampling([distinct[kind] for kind in used], np.searchsorted(used, kinds))
        distinct = [distinct[kind] for kind in used]
    return distinct[0] if distinct else _OF_NO_ROW


class MixedSampling(Sampling):
    """Row b is drawn with settings[kinds[b]], int [B]. Drafters, shapes and rules use it like the
    `Sampling` of a batch. Its fields say nothing.

    A greedy row among others has the one-hot distribution of its argmax. Its draft is the one that
    it has alone (`decode.shapes`), and exact match judges it (`decode.loop.step.decided`).

    Rows with equal settings are computed together, by their plain `Sampling`. So each row has the
    bits that it has without the others, and the cost per pass grows with the number of different
    settings only by their small fixed parts.
    """

    def __init__(self, settings: Sequence[Sampling], kinds: np.ndarray) -> None:
        self._settings, self._kinds = list(settings), kinds
        self._on_device: dict[torch.device, list[Tensor]] = {}  # the rows of each setting

    # Two of them are equal only if they are the same object.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"MixedSampling({self._settings}, {self._kinds.tolist()})"

    @property
    def greedy(self) -> bool:
        return all(one.greedy for one in self._settings)

    def greedy_rows(self, rows: int) -> np.ndarray:
        return np.array([one.greedy for one in self._settings])[self._kinds]

    @property
    def warmed(self) -> Sampling:
        return combined([one.warmed for one in self._settings], self._kinds)

    @property
    def penalises(self) -> bool:
        return any(one.penalises for one in self._settings)

    def each(self, rows: int) -> Sequence[Penalties]:
        return [self._settings[kind] for kind in self._kinds.tolist()]

    def at(self, rows: Tensor) -> Sampling:
        return combined(self._settings, self._kinds[rows.cpu().numpy()])

    def probs(self, logits: Tensor) -> Tensor:
        """float32 [B, ..., V]: the distributions that tokens are drawn from, also of greedy
        rows."""
        probs = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        for one, rows in self._parts(logits.device):
            part = logits.index_select(0, rows)
            if one.greedy:
                nothing = torch.zeros(part.shape, dtype=torch.float32, device=logits.device)
                part = nothing.scatter_(-1, argmax(part)[..., None], 1.0)
            else:
                part = one.probs(part)
            probs.index_copy_(0, rows, part)
        return probs

    def pick(self, logits: Tensor, uniform: Tensor) -> Tensor:
        if self.greedy:
            return argmax(logits)
        picked = torch.empty(logits.shape[:-1], dtype=torch.int64, device=logits.device)
        for one, rows in self._parts(logits.device):
            part = one.pick(logits.index_select(0, rows), uniform.index_select(0, rows))
            picked.index_copy_(0, rows, part)
        return picked

    def race(self, logits: Tensor, keys: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        if self.greedy:
            return argmax(logits)
        winners = torch.empty(logits.shape[:-1], dtype=torch.int64, device=logits.device)
        for one, rows in self._parts(logits.device):
            part = logits.index_select(0, rows)
            part = one.race(part, keys.index_select(0, rows), vocabulary)
            winners.index_copy_(0, rows, part)
        return winners

    def _parts(self, device: torch.device) -> Iterator[tuple[Sampling, Tensor]]:
        """Each of the settings with its rows, int64 [n]."""
        if device not in self._on_device:
            self._on_device[device] = [
                to_device(np.flatnonzero(self._kinds == kind), device)
                for kind in range(len(self._settings))
            ]
        return zip(self._settings, self._on_device[device], strict=True)
