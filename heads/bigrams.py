"""Baselines for the accuracy of heads: two drafters that need almost no training."""

from collections.abc import Iterable, Sequence

import numpy as np

from decode.drafters.ngram import NgramDrafter, NgramIndex


class Bigrams:
    """Predicts the most frequent follower of each token.

    The counts come from texts, given as (tokens, mask). Only tokens with a true mask are counted or
    scored. If several followers are equally frequent, the lowest id wins.
    """

    def __init__(self, texts: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> None:
        before, after = _pairs(texts)
        pairs, counts = np.unique(np.stack([before, after]), axis=1, return_counts=True)
        order = np.lexsort((pairs[1], -counts, pairs[0]))
        tokens, first = np.unique(pairs[0, order], return_index=True)
        self._best = dict(zip(tokens.tolist(), pairs[1, order][first].tolist(), strict=True))

    def top1(self, texts: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> float:
        """Return the share of tokens in these texts that the previous token predicts correctly."""
        before, after = _pairs(texts)
        guesses = np.array([self._best.get(token, -1) for token in before.tolist()])
        return float((guesses == after).mean()) if len(after) else 0.0


def lookup_top1(texts: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> float:
    """Return the share of masked tokens that prompt lookup predicts from the text before them."""
    right = count = 0
    usual = NgramDrafter()
    for tokens, mask in texts:
        index = NgramIndex(usual.min_n, usual.max_n)
        for token, learnt in zip(tokens, mask, strict=True):
            if learnt:
                count += 1
                right += index.continuation(1) == [token]
            index.extend([token])
    return right / count if count else 0.0


def _pairs(texts: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> tuple[np.ndarray, np.ndarray]:
    """int64 [n] twice: the token before each masked one, and that token."""
    found = [
        (tokens[i - 1], tokens[i])
        for tokens, mask in texts
        for i in range(1, len(tokens))
        if mask[i]
    ]
    table = np.array(found, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]
