"""Measures how well a drafter agrees with a given text or with the target on it, without decoding.

`agreement_sums` compares the distributions of drafter and target. `Bigrams` and `lookup_top1` are
baselines: they predict the text with almost no training.

Shapes: n predicted tokens, c tokens per chunk, V vocabulary, d draft vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from decode.drafters.lookup.ngram import NgramDrafter, continuation
from distill.teacher.teacher_signal import TeacherLogits


@dataclass(frozen=True)
class Agreement:
    """Means over the predicted tokens of a text.

    expected_acceptance: Σ min(p, q) = 1 − TV at temperature 1. p covers the full vocabulary, so
    probability on padding rows or outside a reduced draft vocabulary counts as lost. top1: how
    often the most likely token is the same; this is the acceptance rate of greedy decoding.
    lost_mass: the probability that p has outside the draft vocabulary.
    """

    expected_acceptance: float
    top1: float
    lost_mass: float

    @classmethod
    def from_sums(cls, sums: Tensor) -> "Agreement":
        """sums: the result of `agreement_sums`, added up over batches and ranks."""
        acceptance, top1, lost, count = sums.tolist()
        return cls(acceptance / count, top1 / count, lost / count)


@torch.no_grad()
def agreement_sums(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher: Callable[[slice], TeacherLogits],
    vocabulary: Tensor | None,
    *,
    chunk: int = 256,
) -> Tensor:
    """Return float64 [4]: sums of acceptance, top-1 matches and lost mass, and the count n.

    hidden: [n, H], weight: [d, H] and bias: [d] of the drafter. teacher(slice) returns the target's
    logits over its full vocabulary. vocabulary: int64 [d], the token ids of a reduced output layer;
    None means row i is token i.
    """
    sums = torch.zeros(4, dtype=torch.float64, device=hidden.device)
    for begin in range(0, len(hidden), chunk):
        part = slice(begin, begin + chunk)
        q = F.linear(hidden[part], weight, bias).float().softmax(-1)
        p = teacher(part).logits.float().softmax(-1)
        draftable = p[:, : q.shape[1]] if vocabulary is None else p[:, vocabulary]
        guesses = q.argmax(-1)
        if vocabulary is not None:
            guesses = vocabulary[guesses]
        sums[0] += torch.minimum(draftable, q).sum(dtype=torch.float64)
        sums[1] += (guesses == p.argmax(-1)).sum()
        sums[2] += (1 - draftable.sum(-1)).sum(dtype=torch.float64)
        sums[3] += len(q)
    return sums


class Bigrams:
    """Predicts the most frequent follower of each token.

    The counts come from texts, given as (tokens, mask). Only tokens with a true mask are counted or
    scored. If several followers are equally frequent, the lowest id wins. n pairs take some 40 n
    bytes while they are counted.
    """

    def __init__(self, texts: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> None:
        before, after = _pairs(texts)
        pairs, counts = np.unique(before << 32 | after, return_counts=True)
        before, after = pairs >> 32, pairs & 0xFFFFFFFF
        order = np.lexsort((after, -counts, before))
        self._tokens, first = np.unique(before[order], return_index=True)
        self._followers = after[order][first]

    def top1(self, texts: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> float:
        """Return the share of tokens in these texts that the previous token predicts correctly."""
        before, after = _pairs(texts)
        if not len(after) or not len(self._tokens):
            return 0.0
        places = np.searchsorted(self._tokens, before).clip(max=len(self._tokens) - 1)
        right = (self._tokens[places] == before) & (self._followers[places] == after)
        return float(right.mean())


def lookup_top1(texts: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> float:
    """Return the share of masked tokens that prompt lookup predicts from the text before them."""
    right = count = 0
    defaults = NgramDrafter()
    for tokens, mask in texts:
        text = np.asarray(tokens, np.int64)
        for place in np.flatnonzero(mask):
            count += 1
            found, _ = continuation(text[:place], defaults.min_n, defaults.max_n, 1)
            right += found == [text[place]]
    return right / count if count else 0.0


def _pairs(texts: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> tuple[np.ndarray, np.ndarray]:
    """int64 [n] twice: the token before each masked one, and that token."""
    pairs = [np.zeros((2, 0), np.int32)]
    for tokens, mask in texts:
        ids, counted = np.asarray(tokens, np.int32), np.asarray(mask[1:], bool)
        pairs.append(np.stack([ids[:-1][counted], ids[1:][counted]]))
    before, after = np.concatenate(pairs, axis=1).astype(np.int64)
    return before, after
