"""Promises 21 and 22: sampled text has exactly the target's distribution, and these tests can tell.

The rules alone are enumerated in `test_rules`; here the whole loop is sampled, once for each rule
and each kind of draft that it judges.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from decode.contexts import Contexts, Limits
from decode.draft import Draft
from decode.drafters import Drafter
from decode.drafters.ngram import NgramDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.rules import RULES, Rule
from decode.rules.speculative import SpeculativeSampling
from decode.sampling import Noise, Sampling, draw
from decode.scores import Scores
from tests.lossless import SAMPLING, VOCAB, FixedDraft, Watched, decode, model, small_lm
from tests.mutants import (
    BonusOffByOne,
    ClampedRatio,
    FirstReject,
    JudgedAsDistinct,
    NotRenormalised,
    PlainSpeculative,
    WrongResidualRow,
)

ROWS = 500_000
SEEDS = 20

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "drawn chain": small_lm,
    "looked up chain": lambda: NgramDrafter(1, 2),
    # Likely and unlikely tokens at each depth.
    "fixed chain": lambda: FixedDraft((0, 1)),
    "fixed tree": lambda: FixedDraft((5, 0, 9, 3, 1, 0), (-1, -1, 0, 0, 1, 1)),
    "chosen": lambda: small_lm("chosen"),
    "independent": lambda: small_lm("independent"),
    "distinct": lambda: small_lm("distinct"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "drafter", "rows"),
    [
        ("speculative", "drawn chain", ROWS),
        ("speculative", "looked up chain", ROWS // 4),
        # These emit the target's own draws, so there is less to go wrong.
        ("exact", "drawn chain", ROWS // 4),
        ("exact", "fixed tree", ROWS // 4),
        # Enumeration has proven the rules; what is left is how they and the loop fit together.
        ("block", "drawn chain", ROWS // 2),
        ("block", "fixed chain", ROWS // 5),
        ("multi_round", "independent", ROWS // 4),
        ("multi_round", "distinct", ROWS // 4),
        ("multi_round", "chosen", ROWS // 5),
        ("multi_round", "drawn chain", ROWS // 5),
        ("traversal", "independent", ROWS // 4),
        ("traversal", "distinct", ROWS // 4),
        ("traversal", "chosen", ROWS // 5),
        ("spectr", "independent", ROWS // 4),
        ("spectr", "drawn chain", ROWS // 5),
    ],
)
def test_texts_have_the_targets_distribution(rule: str, drafter: str, rows: int) -> None:
    watched = Watched(RULES[rule]())
    found, counts = decode(DRAFTERS[drafter](), watched, rows=rows)
    assert found.passes, found
    # Bins enough, and all branches: text after a rejection, and the bonus after a whole draft.
    assert found.df > 100
    assert watched.rejecting / watched.rounds >= 0.2
    assert counts.by_accepted[2] / counts.steps >= 0.05


# --- errors that the test above must find ---------------------------------------------------------


class ColdDrafter(SmallLMDrafter):
    """Draws at 0.95 times the temperature, and declares the q of the temperature asked for."""

    def draft(self, contexts: Contexts, limits: Limits, sampling: Sampling, noise: Noise) -> Draft:
        cold = replace(sampling, temperature=0.95 * sampling.temperature)
        draft = super().draft(contexts, limits, cold, noise)
        assert draft.q is not None
        asked = draft.q**0.95
        draft.q = asked / asked.sum(-1, keepdim=True)
        return draft


@pytest.mark.parametrize("chosen", [False, True])
def test_the_rule_to_break_is_the_rule(chosen: bool) -> None:
    """So the errors below differ from what is tested above by nothing but the error."""
    generator = torch.Generator().manual_seed(0)
    rows, nodes = 20_000, 3
    logits = torch.randn(rows, nodes + 1, VOCAB, generator=generator) * 2
    q = SAMPLING.probs(torch.randn(rows, nodes, VOCAB, generator=generator) * 2)
    tokens = draw(q, torch.rand(rows, nodes, generator=generator, dtype=torch.float64))
    sizes = torch.randint(0, nodes + 1, (rows,), generator=generator).numpy()
    draft = Draft(tokens, sizes, None if chosen else q)
    noise = Noise(0, torch.arange(rows))
    ours = SpeculativeSampling().verify(draft, Scores(logits, SAMPLING), noise)
    plain = PlainSpeculative().verify(draft, Scores(logits, SAMPLING), noise)
    for name in ("accepted", "reached", "next_token"):
        assert torch.equal(getattr(ours, name), getattr(plain, name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "drafter", "rows"),
    [
        # Fewer rows than above suffice, so the test above finds these errors all the more.
        (SpeculativeSampling(), lambda: ColdDrafter(model(0.2)), 70_000),
        (WrongResidualRow(), small_lm, 10_000),
        (BonusOffByOne(), small_lm, 20_000),
        (ClampedRatio(), small_lm, 25_000),
        (FirstReject(), small_lm, 6_000),
        (NotRenormalised("traversal"), DRAFTERS["distinct"], 10_000),
        (JudgedAsDistinct("multi_round"), DRAFTERS["independent"], 15_000),
    ],
)
def test_errors_are_found(rule: Rule, drafter: Callable[[], Drafter], rows: int) -> None:
    fits = [decode(drafter(), rule, rows=rows, seed=seed)[0] for seed in range(SEEDS)]
    assert sum(not found.passes for found in fits) >= 19, fits
