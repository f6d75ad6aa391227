"""Promise 21 for heads: sampled text has the target's distribution, in chains and in trees, whose q
is that of the heads; the joint of three tokens, as in test_lossless."""

from typing import Any

import numpy as np
import pytest
import torch

from decode.drafters import DRAFTERS, Drafter
from decode.drafters.lookup.ngram import NgramDrafter
from decode.drafters.several.cascade import HorizontalCascade
from decode.model.cache.sliding_window import SlidingWindow
from decode.rules import RULES
from decode.shapes import Shape
from decode.shapes.static import Static
from heads import HEADS
from heads.heads_module import HeadOptions
from heads.in_tree import InTreeDrafter
from tests.lossless import (
    LONGER,
    SHORT,
    Case,
    Watched,
    decode,
    decode_runs,
    through_transformers,
)

ROWS = 100_000


KINDS: dict[str, dict[str, Any]] = {
    "medusa": {"type": "medusa", "heads": 3},
    "blockwise": {"type": "blockwise", "k": 4},
    "hydra": {"type": "hydra", "heads": 3},
    "hydra_plus": {"type": "hydra_plus", "heads": 3, "layers": 2},
    "eagle1": {"type": "eagle1", "depth": 3},
    "eagle3": {"type": "eagle3", "steps": 3},
    "p_eagle": {"type": "p_eagle", "tokens": 3, "layers": 2},
    "pass": {"type": "pass", "tokens": 2},
    "in_tree": {"type": "pass", "tokens": 3},
    # Any token may be the mask: what is drafted then is worse, not wrong.
    "dflash": {"type": "dflash", "layers": 2, "block": 4, "taps": [0], "mask_token": 2},
    "dspark": {
        "type": "dspark",
        "layers": 1,
        "block": 3,
        "taps": [0],
        "mask_token": 2,
        "rank": 4,
    },
    # Of two layers: only LONGER's target has them.
    "kangaroo": {"type": "kangaroo", "exit_layer": 1, "depth": 3},
}


def drafter(kind: str, shape: Shape | None, case: Case = SHORT) -> Drafter:
    """Untrained heads guess the token before; these are moved so that they guess more than that."""
    if kind == "medusa, then lookup":
        return HorizontalCascade(drafter("medusa", shape, case), NgramDrafter(1, 1), depth=1)
    lm = case.model(0.0)
    options = HeadOptions.of(KINDS[kind])
    made: Any = HEADS[options.type](options, lm)  # type: ignore[call-arg]
    made.init_weights(lm)
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if not name.startswith("output."):
                parameter += 0.2 * torch.randn(parameter.shape, generator=g)
    made.borrow(lm)
    build: Any = InTreeDrafter if kind == "in_tree" else DRAFTERS[kind]
    found: Drafter = build(made, case.vocab, shape)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rule", "draw"),
    [
        ("medusa", "speculative", None),
        ("medusa, then lookup", "speculative", None),
        ("medusa", "multi_round", "top"),
        ("medusa", "multi_round", "distinct"),
        ("medusa", "traversal", "independent"),
        ("medusa", "exact", "top"),
        ("hydra", "speculative", None),
        ("hydra", "multi_round", "distinct"),
        ("hydra_plus", "multi_round", "distinct"),
        ("eagle1", "speculative", None),
        ("eagle1", "traversal", "independent"),
        ("eagle3", "multi_round", "distinct"),
        ("p_eagle", "speculative", None),
        ("p_eagle", "traversal", "distinct"),
        ("pass", "speculative", None),
        ("pass", "multi_round", "distinct"),
        ("dflash", "speculative", None),
        ("dflash", "multi_round", "distinct"),
        ("dspark", "speculative", None),
        ("dspark", "traversal", "independent"),
    ],
)
def test_texts_have_the_targets_distribution(
    kind: str, rule: str, draw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The target here has one layer, which stands for all three.
    monkeypatch.setattr("heads.eagle_heads.auxiliary_layers", lambda layers: (0, 0, 0))
    shape = None if draw is None else Static(widths=[2, 2, 1], draw=draw)
    watched = Watched(RULES[rule]())
    found, counts = decode(drafter(kind, shape), watched, rows=ROWS)
    assert found.passes, found
    # Bins enough, and all branches: text after a rejection, and what follows accepted tokens.
    assert found.df > 50
    assert watched.rejecting / watched.rounds >= 0.1
    assert counts.by_accepted[1:].sum() / counts.steps >= 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rule", "draw"),
    [
        ("medusa", "block", None),
        ("medusa, then lookup", "block", None),
        ("medusa", "spectr", "independent"),
        ("hydra", "block", None),
        ("blockwise", "speculative", None),
        ("blockwise", "traversal", "distinct"),
        ("hydra_plus", "spectr", "independent"),
        ("eagle1", "block", None),
        ("eagle1", "multi_round", "distinct"),
        ("eagle3", "speculative", None),
        ("eagle3", "traversal", "distinct"),
        ("p_eagle", "block", None),
        ("pass", "block", None),
        ("pass", "traversal", "distinct"),
        ("in_tree", "block", None),
        ("in_tree", "traversal", "distinct"),
        ("dflash", "block", None),
        ("dflash", "traversal", "distinct"),
        ("dspark", "multi_round", "distinct"),
        ("kangaroo", "speculative", None),
        ("kangaroo", "traversal", "distinct"),
    ],
)
def test_ragged_texts_of_many_rounds(
    kind: str, rule: str, draw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of different lengths, drafts three deep, and texts that end inside a block."""
    # The target here has two layers, which stand for all three.
    monkeypatch.setattr("heads.eagle_heads.auxiliary_layers", lambda layers: (0, 0, 1))
    check_ragged_texts(kind, rule, draw, LONGER)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rule", "draw"),
    [("eagle1", "traversal", "distinct"), ("dflash", "speculative", None)],
)
def test_ragged_texts_through_transformers(kind: str, rule: str, draw: Any) -> None:
    """The hidden states that the heads read come from the other forward."""
    check_ragged_texts(kind, rule, draw, through_transformers(LONGER))


def check_ragged_texts(kind: str, rule: str, draw: Any, case: Case) -> None:
    shape = None if draw is None else Static(widths=[2, 2, 1], draw=draw)
    found, counts = decode(drafter(kind, shape, case), RULES[rule](), rows=12_000, case=case)
    assert found.passes, found
    assert found.df > 100
    assert counts.by_accepted[2:].sum() / counts.steps > 0.03


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rule", "draw"),
    [
        ("eagle1", "traversal", "distinct"),
        ("dflash", "speculative", None),
        ("kangaroo", "multi_round", "distinct"),
    ],
)
def test_drafters_that_see_a_window_keep_the_distribution(kind: str, rule: str, draw: Any) -> None:
    """Prompts on both sides of the window, so rows also read different slots."""
    shape = None if draw is None else Static(widths=[2, 2, 1], draw=draw)
    windowed = drafter(kind, shape, LONGER).with_window(SlidingWindow(4, sinks=1))
    found, counts = decode(windowed, RULES[rule](), rows=12_000, case=LONGER)
    assert found.passes, found
    assert found.df > 100
    assert counts.by_accepted[2:].sum() / counts.steps > 0.03


@pytest.mark.slow
def test_a_stop_by_the_confidence_head_keeps_the_distribution() -> None:
    """The estimates differ from token to token, and drafts end at all lengths."""
    heads: Any = drafter("dspark", None, LONGER)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        heads.heads.confidence_head.proj.weight.normal_(generator=generator)
        heads.heads.confidence_head.proj.bias.fill_(1.0)
    policy = "reach:max_depth=3,threshold=0.4"
    found, runs = decode_runs(
        heads, RULES["speculative"](), rows=12_000, case=LONGER, policy=policy
    )
    assert found.passes, found
    assert found.df > 100
    drafted = np.concatenate([step.drafted for step in runs[0].steps])
    assert (np.bincount(drafted, minlength=4)[1:] / len(drafted) > 0.05).all()
