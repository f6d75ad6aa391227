"""Drafts the text that a row's grammar forces."""

import numpy as np

from decode.draft import Contexts, Draft, Limits
from decode.drafters import DRAFTERS, Drafter
from decode.draw.constraint import Guide
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling


@DRAFTERS.register("grammar")
class GrammarDrafter(Drafter):
    """Drafts the run of text that must follow under the row's grammar (jump-forward decoding,
    2312.07104, section 4): the names and signs of a JSON Schema, the rest of a choice. Needs no
    training. A row without a grammar gets no draft, and so does a place where the text can go on in
    two ways.

    The run is cut into tokens as the target's tokenizer cuts it. The mask allows other cuts too, so
    the target judges these tokens as all others: they are chosen, q is 1, and a wrong one is
    rejected. The last token is the least sure one: the tokenizer may join the end of the run
    with what follows. It is drafted all the same: a rejected node costs less than the pass that it
    saves where it is right. If the run completes the text and one id ends texts, that id follows.
    """

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        guides = contexts.guides or [None] * len(contexts.lengths)
        each = zip(guides, contexts.tokens, contexts.lengths, limits.depths.tolist(), strict=True)
        return Draft.chosen(
            [
                _forced(guide, tokens[guide.begin : length])[:depth] if guide and depth else []
                for guide, tokens, length, depth in each
            ]
        )


def _forced(guide: Guide, text: np.ndarray) -> list[int]:
    try:
        return guide.forced(text)
    except Exception:
        return []  # the mask of this text raises too, and ends the row with its error
