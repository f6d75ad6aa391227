"""The drafter for heads: it reads hidden states in the decode loop and loads stored heads.

Shapes: B rows, n tokens, F features of a token.
"""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from decode.draft import Contexts, Draft, Limits
from decode.drafters.trained import ShapedDrafter, take_weights
from decode.errors import UserError
from decode.sampling import CounterRNG, Sampling
from decode.target.hidden_states import Features
from decode.target.loading import DTYPES, Target
from decode.trees import Growth, Shape
from decode.verification import Verification
from heads.base import Heads
from heads.store import load_heads


class HeadsDrafter(ShapedDrafter):
    """Drafts in any shape, at most as deep as there are heads.

    It drafts from the hidden states of the last token that the target has read. The verification
    pass provides them. So one target call verifies a draft and gives the input of the next draft
    (1811.03115, section 4).

    vocab_size: the target's vocabulary size. shape: a chain by default. Raises UserError for a
    shape deeper than the heads.
    """

    trained = True

    def __init__(self, heads: Heads, vocab_size: int, shape: Shape | None = None) -> None:
        super().__init__(vocab_size, shape, farthest=heads.depth)
        self.heads = heads.eval().requires_grad_(False)
        self.captured_layers = heads.captured_layers
        if (self.shape.depth or 0) > heads.depth:
            raise UserError(
                f"a tree {self.shape.depth} deep and heads for {heads.depth} tokens; make the tree "
                "shallower, or train more heads"
            )
        self.last = torch.zeros(0)  # [B, F]: the newest features of each row
        self._read = np.zeros(0, dtype=bool)  # [B]: whether the row has features

    @classmethod
    def load(cls, path: Path, target: Target, *, dtype: str) -> Self:
        """Load a directory written by `heads.store.save_heads`."""
        heads, shape = load_heads(path, target, DTYPES[dtype])
        return cls(heads, target.vocab_size, shape)

    @abstractmethod
    def growth(self, contexts: Contexts, sampling: Sampling, deepest: int) -> Growth:
        """Return the object that predicts the next tokens after the text and after each node.

        deepest: the max depth of the draft.
        """

    def with_shape(self, shape: Shape) -> Self:
        return type(self)(self.heads, self.vocab_size, shape)

    def start(self, contexts: Contexts) -> None:
        self._read = np.zeros(len(contexts.lengths), dtype=bool)

    def observe(self, done: Verification) -> None:
        if done.features is not None:
            self.read(done.features)

    def read(self, features: Features) -> None:
        """Take the target's hidden states of new tokens, in the order of the text."""
        self.last = features.newest(self.captured_layers).to(next(self.heads.parameters()).dtype)
        self._read = features.counts > 0

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        # A prompt of one token has no features before its first pass.
        depths = np.where(self._read, np.minimum(limits.depths, self.heads.depth), 0)
        if not depths.any():
            return Draft.none(len(contexts.lengths), "cpu")
        within = Limits(depths, limits.stops)
        growth = self.growth(contexts, sampling, within.deepest)
        return self.shape.grow(growth, within, sampling, rng)

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace some weights of the heads.

        This is safe in the middle of a text, because the heads read only the target's hidden
        states. Never call it during a draft: q must come from one set of weights. Raises UserError
        for weights that the heads do not have, and then changes nothing.
        """
        take_weights(self.heads, weights)

    def keep_rows(self, rows: Tensor) -> None:
        self._read = self._read[rows.cpu().numpy()]
        if len(self.last):
            self.last = self.last.index_select(0, rows.to(self.last.device))
