"""Figures of answers that have a grammar: how many are complete, how much of them was forced."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from decode.draw.constraint import Guide
from decode.grammars import Grammar


def structured_figures(
    grammars: Sequence[Grammar | None], outputs: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """`answers`: those with a grammar. `complete`: the share of them that ended where the grammar
    lets a text end; the others reached the length limit. `forced_share`: the share of their tokens
    that stood in a run of forced text, cut as it is (`Guide.forced`). The end counts as a token.
    Without an answer the shares are None."""
    pairs = [(g, text) for g, text in zip(grammars, outputs, strict=True) if g is not None]
    forced = sum(forced_tokens(grammar, text) for grammar, text in pairs)
    tokens = sum(len(text) for _, text in pairs)
    complete = sum(text[-1] in grammar.ends for grammar, text in pairs)
    return {
        "answers": len(pairs),
        "complete": complete / len(pairs) if pairs else None,
        "forced_share": forced / tokens if tokens else None,
    }


def forced_tokens(grammar: Grammar, text: Sequence[int]) -> int:
    """How many tokens of a text stood in forced runs."""
    guide, tokens = Guide(grammar, 0), np.asarray(text)
    count = place = 0
    while place < len(text):
        run = guide.forced(tokens[:place])
        same = [a == b for a, b in zip(run, text[place:], strict=False)]
        length = same.index(False) if False in same else len(same)
        count, place = count + length, place + max(length, 1)
    return count
