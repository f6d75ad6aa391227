"""The rows that decode together: where each text is, how they join, and which place each one keeps.

Shapes: B rows, C tokens of space.
"""

from collections.abc import Sequence

import numpy as np
import torch

from decode.device import to_device
from decode.draft import Contexts
from decode.errors import UserError
from decode.sampling import CounterRNG


class Rows:
    """Rows with their texts, limits and random numbers.

    numbers: int [B], the number of each row in its decode. A number is never used again.
    contexts: the committed texts. ends: int [B], the largest length of each text. rng: the random
    numbers.
    """

    def __init__(
        self, numbers: np.ndarray, contexts: Contexts, ends: np.ndarray, rng: CounterRNG
    ) -> None:
        self.numbers, self.contexts, self.ends, self.rng = numbers, contexts, ends, rng

    @classmethod
    def none(cls, device: torch.device) -> "Rows":
        nothing = np.zeros(0, dtype=np.int64)
        rng = CounterRNG(0, torch.zeros(0, dtype=torch.int64, device=device))
        return cls(nothing, Contexts.of((), 0), nothing, rng)

    def __len__(self) -> int:
        return len(self.numbers)

    def add(self, new: "Rows") -> None:
        """Append rows that join."""
        self.numbers = np.concatenate([self.numbers, new.numbers])
        self.ends = np.concatenate([self.ends, new.ends])
        # A new object: the last verification still refers to the old one.
        both = Contexts(self.contexts.tokens, self.contexts.lengths)
        both.add_rows(new.contexts)
        self.contexts = both
        self.rng.add_rows(new.rng)

    def keep(self, rows: np.ndarray) -> None:
        """Keep only these rows, int [B'], in this order."""
        self.numbers, self.ends = self.numbers[rows], self.ends[rows]
        self.contexts.keep_rows(rows)
        self.rng.keep_rows(to_device(rows, self.rng.device))


def compacted(stays: np.ndarray) -> np.ndarray:
    """int [B']: the rows that stay (`stays`, bool [B]), in their new order. The last rows move into
    the holes, so each row that leaves moves at most one other.

    >>> compacted(np.array([True, False, True, True])).tolist()
    [0, 3, 2]
    """
    kept = np.flatnonzero(stays)
    order = np.arange(len(kept))
    order[~stays[: len(kept)]] = kept[kept >= len(kept)]
    return order


def require_prompts(prompts: Sequence[Sequence[int]], max_positions: int, vocab_size: int) -> None:
    """Raise UserError for prompts (token ids) that cannot be decoded: no prompts, an empty prompt,
    a prompt that fills the context, or ids outside the vocabulary. The message gives the index of
    the prompt."""
    if not prompts:
        raise UserError("there are no prompts to decode")
    for row, prompt in enumerate(prompts):
        if not len(prompt):
            raise UserError(f"prompt {row} is empty; a model needs at least one token")
        if len(prompt) >= max_positions:
            raise UserError(
                f"prompt {row} has {len(prompt)} tokens and the target's context holds "
                f"{max_positions}, so there is no room for an answer; shorten the prompt"
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise UserError(
                f"prompt {row} has token ids from {min(prompt)} to {max(prompt)}; expected ids "
                f"from 0 to {vocab_size - 1}. Use the target's tokenizer"
            )
