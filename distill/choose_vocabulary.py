"""Chooses the tokens of a reduced draft vocabulary.

`decode.drafters.draft_vocabulary` holds its output layer.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decode.base.errors import UserError

COUNTED = 1 << 20  # tokens that are counted together


def most_frequent(
    texts: Iterable[Sequence[int]], count: int, vocab_size: int, always: Sequence[int] = ()
) -> tuple[Tensor, float]:
    """Return the `count` most frequent token ids of some texts, and their coverage.

    The ids are ascending int64 [count]. The coverage is the share of the texts' tokens that are in
    the set. always: ids that are always kept, even if they are rare (such as EOS). Raises UserError
    unless 1 ≤ count < vocab_size.
    """
    if not 1 <= count < vocab_size:
        raise UserError(
            f"the draft vocabulary has {count} tokens; expected at least 1 and fewer than the "
            f"target's {vocab_size}"
        )
    frequency = token_counts(texts, vocab_size)
    rank = frequency.clone()
    rank[list(always)] = torch.iinfo(torch.int64).max
    # A stable sort keeps the lowest ids of the unseen tokens. A tokenizer learnt these first.
    kept = rank.argsort(descending=True, stable=True)[:count].sort().values
    return kept, float(frequency[kept].sum() / frequency.sum().clamp(min=1))


def token_counts(texts: Iterable[Sequence[int]], vocab_size: int) -> Tensor:
    """int64 [vocab_size]: how often each token occurs."""
    counts = np.zeros(vocab_size, np.int64)
    tokens = itertools.chain.from_iterable(texts)
    # Many texts at once: each sum is over the whole vocabulary.
    while len(part := np.fromiter(itertools.islice(tokens, COUNTED), np.int64)):
        counts += np.bincount(part, minlength=vocab_size)
    return torch.from_numpy(counts)


@dataclass(frozen=True)
class Coverage:
    """Coverage of a draft vocabulary of `size` tokens, as a share of a text's tokens.

    of_text: on the text from which the tokens were chosen. of_unseen: on one half of the text, with
    tokens chosen from the other half. It estimates the coverage of new text.
    """

    size: int
    of_text: float
    of_unseen: float


def coverage(
    texts: Sequence[Sequence[int]], sizes: Sequence[int], vocab_size: int
) -> list[Coverage]:
    """Return the coverage of the most frequent tokens at each size.

    Raises UserError for a size out of range, and for fewer than two texts, which cannot be halved.
    """
    if len(texts) < 2:
        raise UserError(f"found {len(texts)} texts; coverage needs at least two")
    coverages = []
    for size in sizes:
        _, of_text = most_frequent(texts, size, vocab_size)
        unseen = 0.0
        for half, other in ((texts[::2], texts[1::2]), (texts[1::2], texts[::2])):
            ids, _ = most_frequent(half, size, vocab_size)
            counts = token_counts(other, vocab_size)
            unseen += float(counts[ids].sum() / counts.sum().clamp(min=1)) / 2
        coverages.append(Coverage(size, of_text, unseen))
    return coverages


def rows_of_tokens(ids: Tensor, vocab_size: int) -> Tensor:
    """int64 [vocab_size]: the row of each token in the reduced layer.

    A token without a row has −100, which losses over labels ignore.
    """
    table = torch.full((vocab_size,), -100, dtype=torch.int64, device=ids.device)
    table[ids] = torch.arange(len(ids), device=ids.device)
    return table
