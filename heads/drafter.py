"""Heads as a drafter: what they read in the loop, and how they are loaded.

Shapes: B rows, n tokens, F features of a token.
"""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from decode.draft import Draft
from decode.drafters import Contexts, Limits
from decode.drafters.new_weights import take_weights
from decode.drafters.shaped import ShapedDrafter
from decode.errors import UserError
from decode.sampling import Noise, Sampling
from decode.target.hidden_states import Features
from decode.target.loading import DTYPES, Target
from decode.trees import Shape
from decode.trees.growth import Growth
from heads.base import Heads
from heads.store import load_heads


class HeadsDrafter(ShapedDrafter):
    """Drafts in any shape, at most as deep as there are heads, from the hidden states of the last
    token that the target has read. Those come from the verification pass, so that one target call
    both judges a draft and yields what the next one is made of (1811.03115, section 4).

    vocab_size: of the target. shape: default a chain. Raises UserError for a shape that is deeper
    than the heads.
    """

    trained = True

    def __init__(self, heads: Heads, vocab_size: int, shape: Shape | None = None) -> None:
        super().__init__(vocab_size, shape, farthest=heads.depth)
        self.heads = heads.eval().requires_grad_(False)
        self.taps = heads.taps
        if (self.shape.depth or 0) > heads.depth:
            raise UserError(
                f"a tree {self.shape.depth} deep and heads for {heads.depth} tokens; make the tree "
                "shallower, or train more heads"
            )
        self.last = torch.zeros(0)  # [B, F]: the newest features of each row
        self._read = np.zeros(0, dtype=bool)  # [B]: whether there are any

    @classmethod
    def load(cls, path: Path, target: Target, *, dtype: str) -> Self:
        """A directory as `heads.store.save_heads` writes it."""
        heads, shape = load_heads(path, target, DTYPES[dtype])
        return cls(heads, target.vocab_size, shape)

    @abstractmethod
    def growth(self, contexts: Contexts, sampling: Sampling, deepest: int) -> Growth:
        """What follows the text and each node, in a draft at most `deepest` deep."""

    def with_shape(self, shape: Shape) -> Self:
        return type(self)(self.heads, self.vocab_size, shape)

    def start(self, contexts: Contexts) -> None:
        self._read = np.zeros(len(contexts.lengths), dtype=bool)

    def read(self, features: Features) -> None:
        self.last = features.newest(self.taps).to(next(self.heads.parameters()).dtype)
        self._read = features.counts > 0

    def draft(self, contexts: Contexts, limits: Limits, sampling: Sampling, noise: Noise) -> Draft:
        # A prompt of one token has no features when its own first pass is still to come.
        depths = np.where(self._read, np.minimum(limits.depths, self.heads.depth), 0)
        if not depths.any():
            return Draft.none(len(contexts.lengths), "cpu")
        within = Limits(depths, limits.stops)
        growth = self.growth(contexts, sampling, within.deepest)
        return self.shape.grow(growth, within, sampling, noise)

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Go on with other values of some of the heads' weights, also in the middle of texts: what
        the heads read is the target's. Never while they draft: q is that of one set of weights.
        Raises UserError, with nothing changed, for weights that they do not have."""
        take_weights(self.heads, weights)

    def keep_rows(self, rows: Tensor) -> None:
        self._read = self._read[rows.cpu().numpy()]
        if len(self.last):
            self.last = self.last.index_select(0, rows.to(self.last.device))
