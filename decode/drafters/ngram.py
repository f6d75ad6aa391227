"""Prompt lookup: drafts the tokens that followed an earlier copy of the text's last few tokens."""

import torch

from decode.draft import Draft
from decode.drafters import DRAFTERS, Contexts, Drafter, Limits
from decode.errors import UserError
from decode.sampling import CounterRNG, Sampling


class NgramIndex:
    """The last end of each n-gram of one text, for n in min_n … max_n. Grows token by token."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self.sizes = range(max_n, min_n - 1, -1)
        self.text: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            # The n-grams that end at the last token are stored only when another token follows:
            # then they have a continuation, and the end of the text never matches itself.
            end = len(self.text)
            for n in self.sizes:
                if n <= end:
                    self._ends[tuple(self.text[end - n :])] = end
            self.text.append(token)

    def continuation(self, count: int) -> list[int]:
        """At most `count` tokens that follow the last earlier match of the longest known suffix."""
        for n in self.sizes:
            if n < len(self.text):
                end = self._ends.get(tuple(self.text[-n:]))
                if end is not None:
                    return self.text[end : end + count]
        return []


@DRAFTERS.register("ngram")
class NgramDrafter(Drafter):
    """Looks up the last max_n … min_n tokens in the row's own context. Needs no training.

    Each token costs a few dictionary entries, at any text length. A row without a match drafts
    nothing. Raises UserError unless 1 ≤ min_n ≤ max_n.
    """

    def __init__(self, min_n: int = 1, max_n: int = 3) -> None:
        if not 1 <= min_n <= max_n:
            raise UserError(
                f"n-gram sizes min_n={min_n}, max_n={max_n}; expected 1 ≤ min_n ≤ max_n"
            )
        self.min_n, self.max_n = min_n, max_n
        self._rows: list[NgramIndex] = []

    def start(self, contexts: Contexts) -> None:
        self._rows = [NgramIndex(self.min_n, self.max_n) for _ in contexts.lengths]

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        found = []
        for index, tokens, length, depth in zip(
            self._rows, contexts.tokens, contexts.lengths, limits.depths, strict=True
        ):
            index.extend(tokens[len(index.text) : length].tolist())
            found.append(index.continuation(int(depth)))
        return Draft.chosen(found)

    def keep_rows(self, rows: torch.Tensor) -> None:
        self._rows = [self._rows[row] for row in rows.tolist()]
