"""Long texts are read in passes, and other passes may come in between.

Shapes: B rows, n tokens of the longest text, V vocabulary, H hidden size.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from decode.base.device import to_device


class FeedsSlots(Protocol):
    """A model over slots: see the members of `CachedLM` with these names."""

    @property
    def features(self) -> Mapping[int, Tensor]: ...

    def pass_limit(self, length: int) -> int: ...

    def only(self, first: int, end: int) -> AbstractContextManager[None]: ...

    def forward(
        self, ids_BN: Tensor, start: np.ndarray, *, columns: np.ndarray, ends: np.ndarray
    ) -> Tensor: ...


class LongRead:
    """Texts that a model reads into the slots of its fed rows, one pass at a time.

    ids_BN, start, counts: as for `CachedLM.read`. Between two passes the model may feed other rows.
    logits: [B, 1, V], those after each row's last token, once it is `done`; for a row without
    tokens they mean nothing. None before the first pass.
    """

    def __init__(
        self, lm: FeedsSlots, ids_BN: Tensor, start: np.ndarray, counts: np.ndarray
    ) -> None:
        self._lm, self._ids, self._start, self._counts = lm, ids_BN, start, counts
        self._last = np.maximum(counts - 1, 0)
        self._begin = 0  # the column of the next pass
        self._parts: list[Mapping[int, Tensor]] = []
        self.logits: Tensor | None = None

    @property
    def done(self) -> bool:
        """Whether all tokens are read."""
        return self._begin > int(self._last.max())

    @property
    def left(self) -> int:
        """How many tokens are not read yet, over all rows."""
        return int(np.maximum(self._counts - self._begin, 0).sum())

    def read_on(self, tokens: int) -> int:
        """One pass over at most this number of tokens of all rows together, but at least one of
        each row that has some left, and at most `CachedLM.pass_limit`. Returns how many were fed,
        with the padding of shorter rows."""
        lm, begin, last = self._lm, self._begin, self._last
        # The rows up to the last one that has tokens left.
        live = int(np.flatnonzero(last >= begin)[-1]) + 1
        limit = lm.pass_limit(int((self._start + self._counts).max()))
        width = max(min(tokens, limit) // live, 1)
        end = min(begin + width, self._ids.shape[1])
        with lm.only(0, live) if live < len(last) else nullcontext():
            logits = lm.forward(
                self._ids[:live, begin:end],
                self._start[:live] + begin,
                columns=np.clip(last[:live, None] - begin, 0, end - begin - 1),
                ends=self._start[:live] + np.clip(self._counts[:live], begin, end),
            )
        self._parts.append(lm.features)
        self._begin = end
        if self.done and len(self._parts) == 1:
            self.logits = logits
            return live * (end - begin)
        if self.logits is None:
            self.logits = logits.new_zeros(len(last), 1, logits.shape[2])
        reached = np.flatnonzero((begin <= last[:live]) & (last[:live] < end))
        at = to_device(reached, logits.device)
        self.logits[at] = logits[at]
        return live * (end - begin)

    def features(self) -> Mapping[int, Tensor]:
        """The hidden states of all passes, of each captured layer, [B, n, H]."""
        first, *others = self._parts
        if not others:
            return first
        rows = len(self._last)
        return {
            layer: torch.cat([_with_rows(part[layer], rows) for part in self._parts], 1)
            for layer in first
        }


def _with_rows(x: Tensor, rows: int) -> Tensor:
    """x with this number of rows. Rows of zeros are added."""
    return x if len(x) == rows else torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])
