"""What a drafter is told before it drafts: the committed text, and how deep it may go."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass
class Contexts:
    """The committed tokens of the B rows that are being decoded, on the host.

    tokens: int64 [B, C]; row b holds lengths[b] tokens, the rest is room, also for a draft past the
        end of the longest text.
    """

    tokens: np.ndarray
    lengths: np.ndarray

    def keep_rows(self, rows: np.ndarray) -> None:
        self.tokens, self.lengths = self.tokens[rows], self.lengths[rows]


@dataclass
class Limits:
    """How deep a draft may be.

    depths: int [B] on the host, per row; 0 means that nothing shall be drafted there.
    stops: asked before each token of a chain is chosen, with its place (0, 1, …), the drafter's
        logits for it, [B, V'], and which rows are still drafting, bool [B] on the host; says for
        which of those (bool [B]) the draft ends before that token. The logits of other rows mean
        nothing. Never asked about a token that is already chosen: dropping it for its own
        probability would change what is sampled.
    """

    depths: np.ndarray
    stops: Callable[[int, Tensor, np.ndarray], Tensor] | None = None

    @property
    def deepest(self) -> int:
        return int(self.depths.max(initial=0))
