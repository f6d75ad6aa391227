"""Which tokens of a text a layer with a sliding window sees: one rule, for training and drafting.

The first tokens of a text may stay visible as attention sinks (2309.17453): a layer that was
trained without a window puts much of its attention on them.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from decode.base.errors import UserError


@dataclass(frozen=True)
class SlidingWindow:
    """A token sees the last `size` tokens, itself included, and the first `sinks` of the text.

    Raises UserError for a size below 1 or a negative number of sinks.

    >>> import torch
    >>> SlidingWindow(2, sinks=1).sees(torch.tensor(4), torch.arange(5)).tolist()
    [True, False, False, True, True]
    """

    size: int
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.size < 1 or self.sinks < 0:
            raise UserError(
                f"a window of {self.size} tokens and {self.sinks} sinks; expected at least 1 token "
                "and no negative number of sinks"
            )

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """bool: whether tokens at the positions `queries` may see tokens at the positions `keys`,
        int64, broadcast together. Which tokens come later is another matter."""
        near = keys > queries - self.size  # no numbers of every pair
        return near | (keys < self.sinks) if self.sinks else near

    def later(self, count: int) -> "SlidingWindow":
        """What a query `count` positions later still sees of the tokens up to this query. Raises
        UserError if it sees none of them."""
        return SlidingWindow(self.size - count, self.sinks)

    def slots(
        self, base: np.ndarray, ends: np.ndarray, end: int, capacity: int, step: int
    ) -> "slice | np.ndarray":
        """The slots that tokens from slot `base` to `ends`, int [B] each, may see: a slice for all
        rows, which is a view, or int64 [B, S], whose slots are copied.

        Slots are copied if a slice would be more than twice as long: with sinks, or if the texts of
        a batch have very different lengths. end: the end of the slots in use. capacity: the slots
        of a row.
        step: what the length of a slice is a multiple of.
        """
        first = np.maximum(base - self.size + 1, 0)
        lowest = 0 if self.sinks else int(first.min()) // step * step
        first = np.maximum(first, self.sinks)
        count = -(-max(int((ends - first).max()), 1) // step) * step
        if end - lowest <= 2 * (self.sinks + count):
            return slice(lowest, end)
        # There is room for the sinks and `count` more, so no slot comes twice.
        first = np.minimum(first, capacity - count)
        always = np.broadcast_to(np.arange(self.sinks), (len(first), self.sinks))
        return np.concatenate([always, first[:, None] + np.arange(count)], 1)
