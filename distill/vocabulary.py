"""Which tokens a reduced draft vocabulary keeps (`decode.vocabulary` holds its output layer)."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from decode.errors import UserError


def most_frequent(
    texts: Iterable[Sequence[int]], count: int, vocab_size: int, always: Sequence[int] = ()
) -> tuple[Tensor, float]:
    """The `count` most frequent token ids of some texts, ascending int64 [count], and the share of
    the texts' tokens that they cover. `always`: ids that are kept however rare (such as EOS).

    Raises UserError unless 1 ≤ count < vocab_size.
    """
    if not 1 <= count < vocab_size:
        raise UserError(
            f"a draft vocabulary of {count} tokens; expected at least 1 and fewer than the "
            f"target's {vocab_size}"
        )
    frequency = torch.zeros(vocab_size, dtype=torch.int64)
    for text in texts:
        frequency += torch.bincount(torch.tensor(text, dtype=torch.int64), minlength=vocab_size)
    rank = frequency.clone()
    rank[list(always)] = torch.iinfo(torch.int64).max
    # Stable: among tokens never seen the lower ids, which a tokenizer learnt first, are kept.
    kept = rank.argsort(descending=True, stable=True)[:count].sort().values
    return kept, float(frequency[kept].sum() / frequency.sum().clamp(min=1))


def positions(ids: Tensor, vocab_size: int) -> Tensor:
    """int64 [vocab_size]: each token's row in the reduced layer; −100, which losses over labels
    ignore, for a token without one."""
    table = torch.full((vocab_size,), -100, dtype=torch.int64, device=ids.device)
    table[ids] = torch.arange(len(ids), device=ids.device)
    return table
