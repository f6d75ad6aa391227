"""Max-Gram (Cascade Speculative Drafting, 2312.11462, section 3): a drafter without a model."""

import numpy as np

from decode.drafters import DRAFTERS
from decode.drafters.lookup.lookup_tree import LookupTree
from decode.drafters.lookup.ngram import StoreDrafter

# A longer match counts as this long. Each token of a match is a pass over the places that match,
# and in a text that repeats itself the longest match is nearly as long as the text.
LONGEST_MATCH = 64


def longest_match(text: np.ndarray) -> int:
    """The index of the token that follows the longest earlier match of the end of a text, int64
    [L]. L if its last token stands nowhere else. Of several matches, and of those of
    `LONGEST_MATCH` tokens or more, the last one counts.

    >>> longest_match(np.array([1, 2, 3, 9, 2, 3, 1, 2, 3]))
    3
    """
    size = len(text)
    ends = np.flatnonzero(text[:-1] == text[-1])  # where the last token stands
    matches = ends
    for back in range(1, min(size, LONGEST_MATCH)):
        ends = ends[ends >= back]
        ends = ends[text[ends - back] == text[size - 1 - back]]
        if not len(ends):
            break
        matches = ends
    return int(matches[-1]) + 1 if len(matches) else size


@DRAFTERS.register("max_gram")
class MaxGramDrafter(StoreDrafter):
    """Drafts what followed the longest earlier match of the text's end, up to 64 tokens long; after
    that, and without a match, the token that most often followed the last one in all texts so far.

    It looks through each row's text in every round, with one comparison per token, and keeps no
    index of it. The bigrams are a `store` of endings of one token, which also learns the target's
    likeliest tokens. In the paper they come from a corpus. As with `store`, drafts depend on other
    rows and earlier requests, and lossless text does not. `top_k`, `capacity` and
    `width` are those of `store`. Raises UserError as `store` does.
    """

    def __init__(self, top_k: int = 3, capacity: int = 200_000, width: int = 8) -> None:
        super().__init__(1, 1, top_k, capacity, width)

    def look_up(self, row: int, text: np.ndarray, depth: int) -> LookupTree:
        chain: list[int] = []
        if depth:
            begin = longest_match(text)
            chain = text[begin : begin + depth].tolist()
        last = chain[-1:] or text[-1:].tolist()
        while len(chain) < depth and (token := self.store.next(last)) is not None:
            chain.append(token)
            last = [token]
        return LookupTree.path(chain)
