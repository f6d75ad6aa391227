"""Draft-length policies by name: how deep the next draft of each row shall be.

A policy is one file with one registration. It sees what became of earlier drafts and, if it asks,
the drafter's logits; it knows nothing of drafters, rules or the loop. None of them can change what
is sampled: a length is settled before the tokens that it would leave out are drawn.
"""

from abc import ABC, abstractmethod

import numpy as np
from torch import Tensor

from decode.errors import UserError
from decode.registry import Registry
from decode.stats import Step


class Policy(ABC):
    """Life within one decode: start → (depths → stops* → observe)* with keep_rows between.

    most: no draft is deeper. watches: `stops` is to be asked before each token of a chain.
    """

    watches: bool = False

    def __init__(self, most: int) -> None:
        if most < 1:
            raise UserError(f"gamma is {most}; a draft needs at least 1 token (use drafter none)")
        self.most = most
        self.rows = 0

    def start(self, rows: int) -> None:
        """A new batch of so many rows begins. What was learnt of costs may be kept."""
        self.rows = rows

    @abstractmethod
    def depths(self) -> np.ndarray:
        """int [B], 0 … most: how deep each row's next draft may be; all 0 is a plain step."""

    def stops(self, place: int, logits: Tensor) -> Tensor:
        """bool [B]: whose draft ends before its token number `place` (0, 1, …), given the drafter's
        logits for that token, [B, V']. Asked only where `watches`."""
        raise NotImplementedError

    def observe(self, step: Step) -> None:
        """What became of the draft."""
        return None

    def keep_rows(self, rows: np.ndarray) -> None:
        """Only these rows go on, in this order."""
        self.rows = len(rows)


POLICIES: Registry[type[Policy]] = Registry("draft-length policy")

from decode.policies import fixed  # noqa: E402, F401  (registers itself)
