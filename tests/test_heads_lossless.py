"""Promise 21 for heads: sampled text has the target's distribution, in chains and in trees, whose q
is that of the heads; the joint of three tokens, as in test_lossless."""

import numpy as np
import pytest
import torch

from decode.drafters import DRAFTERS
from decode.shapes.static import Static
from heads.base import HeadOptions
from heads.medusa import MedusaHeads
from tests.test_lossless import HEAD, VOCAB, decode, model

ROWS = 200_000


def heads() -> MedusaHeads:
    """Untrained heads guess the token before; these are moved so that they guess more than that."""
    lm = model(0.0)
    made = MedusaHeads(HeadOptions.of({"type": "medusa", "heads": 3}), lm)
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
def test_texts_have_the_targets_distribution(rule: str, draw: str | None) -> None:
    shape = None if draw is None else Static(widths=[2, 2, 1], draw=draw)
    drafter = DRAFTERS["medusa"](heads(), VOCAB, shape)
    found, counts = decode(drafter, rule, rows=ROWS)
    assert found.passes, found
    assert found.df > HEAD**3
    # All branches: text after a rejection, and what follows a whole draft.
    assert (counts.reached.sum() - counts.accepted.sum()) / counts.steps >= 0.1
    assert np.asarray(counts.by_accepted)[1] / counts.steps >= 0.02
