"""The input of a drafter: the committed text, and the limits on the depth of the draft."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass
class Contexts:
    """The committed tokens of the B rows that are being decoded, on the host.

    tokens: int64 [B, C]. Row b holds lengths[b] tokens, the rest is free space. There is space for
        a draft past the end of the longest text.
    """

    tokens: np.ndarray
    lengths: np.ndarray

    def keep_rows(self, rows: np.ndarray) -> None:
        self.tokens, self.lengths = self.tokens[rows], self.lengths[rows]


@dataclass
class Limits:
    """Limits on the depth of a draft.

    depths: int [B] on the host, the max depth per row. 0: draft nothing in that row.
    stops: called before each token of a chain is chosen. Its arguments are the index of the token
        (0, 1, …), the drafter's logits for it, [B, V'], and the rows that are still drafting, bool
        [B] on the host. It returns the rows whose draft ends before that token, bool [B]. The
        logits of rows that are not drafting mean nothing. It is never called for a token that is
        already chosen: dropping a token because of its own probability would change the
        distribution of the text.
    """

    depths: np.ndarray
    stops: Callable[[int, Tensor, np.ndarray], Tensor] | None = None

    @property
    def deepest(self) -> int:
        return int(self.depths.max(initial=0))
