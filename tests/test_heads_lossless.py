"""Promise 21 for heads: sampled text has the target's distribution, in chains and in trees, whose q
is that of the heads; the joint of three tokens, as in test_lossless."""

from typing import Any

import pytest
import torch

from decode.rules import RULES
from decode.shapes.static import Static
from heads.base import HeadOptions
from heads.medusa import MedusaDrafter, MedusaHeads
from tests.lossless import VOCAB, Watched, decode, model

ROWS = 100_000


def heads() -> MedusaHeads:
    """Untrained heads guess the token before; these are moved so that they guess more than that."""
    lm = model(0.0)
    options: Any = HeadOptions.of({"type": "medusa", "heads": 3})
    made = MedusaHeads(options, lm)
    made.start_from(lm)
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.blocks.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=g)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "draw"),
    [
        ("speculative", None),
        ("multi_round", "top"),
        ("multi_round", "distinct"),
        ("traversal", "independent"),
        ("exact", "top"),
    ],
)
def test_texts_have_the_targets_distribution(rule: str, draw: Any) -> None:
    shape = None if draw is None else Static(widths=[2, 2, 1], draw=draw)
    watched = Watched(RULES[rule]())
    found, counts = decode(MedusaDrafter(heads(), VOCAB, shape), watched, rows=ROWS)
    assert found.passes, found
    # Bins enough, and all branches: text after a rejection, and what follows accepted tokens.
    assert found.df > 50
    assert watched.rejecting / watched.rounds >= 0.1
    assert counts.by_accepted[1:].sum() / counts.steps >= 0.05
