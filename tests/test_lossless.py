"""Promises 21 and 22: sampled text has exactly the target's distribution, and these tests can tell.

The rules alone are enumerated in `test_rules`. Here the whole loop is sampled with rules that
`test_drafter_contract` does not pair, and `python -m tools.controls` prints how surely errors are
found.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from decode.draft import Contexts, Draft
from decode.drafters import Drafter, NoDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling, draw
from decode.rules import RULES
from decode.rules.speculative import SpeculativeSampling
from decode.shapes import SHAPES
from decode.verdict import Scores
from tests.controls import CONTROLS, Control
from tests.lossless import (
    LONGER,
    SAMPLING,
    VOCAB,
    Fit,
    FixedDraft,
    Priced,
    Remembering,
    Watched,
    decode,
    decode_runs,
    fit_texts,
    more_texts,
    small_lm,
)
from tests.mutants import PlainSpeculative
from tests.tiny import verify

# The texts of a case. With them, each error of one draft in `tests/controls.py` is found.
ROWS = 12_000


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "drawn chain": small_lm,
    # Likely and unlikely tokens at each depth.
    "fixed tree": lambda: FixedDraft((5, 0, 9, 3, 1, 0), (-1, -1, 0, 0, 1, 1)),
    "independent": lambda: small_lm("independent"),
    "distinct": lambda: small_lm("distinct"),
}


@pytest.mark.slow
@more_texts(10)
@pytest.mark.parametrize(
    ("rule", "drafter"),
    [
        # Enumeration has proven the rules, and `test_drafter_contract` has the others in the loop.
        ("coupled", "drawn chain"),
        ("spectr", "independent"),
        *(
            pytest.param(*pair, marks=pytest.mark.thorough)
            for pair in (
                ("speculative", "drawn chain"),
                ("exact", "fixed tree"),
                ("block", "drawn chain"),
                ("multi_round", "distinct"),
                ("traversal", "independent"),
            )
        ),
    ],
)
def test_texts_have_the_targets_distribution(rule: str, drafter: str, times: int) -> None:
    watched = Watched(RULES[rule]())
    found, counts = decode(DRAFTERS[drafter](), watched, rows=ROWS * times)
    assert found.passes, found
    # Bins enough, and all branches: text after a rejection, and the bonus after a whole draft.
    assert found.df > 100
    assert watched.rejecting / watched.rounds >= 0.2
    assert counts.by_accepted[2] / counts.steps >= 0.05


@more_texts(10)
@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        ("block", {"name": "chain"}),
        ("multi_round", {"name": "static", "widths": [2, 2, 1], "draw": "distinct"}),
        *(
            pytest.param(rule, {"name": "static", "widths": [3, 1, 1], "draw": "independent"})
            for rule in ("spectr", "traversal")
        ),
    ],
)
def test_texts_of_drafts_without_the_nodes_that_do_not_pay(
    rule: str, shape: dict[str, Any], times: int
) -> None:
    """Which nodes do is learnt while texts are decoded. `test_shapes_lossless` enumerates it, and
    finds nodes that are left out for what was drawn."""
    case, policy = LONGER, Priced(4, 0.35)
    drafter = SmallLMDrafter(case.model(0.2), shape=SHAPES.make(shape))
    found, runs = decode_runs(
        drafter, RULES[rule](), rows=ROWS * times // 4, case=case, policy=policy
    )
    assert found.passes, found
    steps = [step for run in runs for step in run.steps]
    left = [step.drafted[step.depths > 2] for step in steps]
    assert len(np.unique(np.concatenate(left))) > 3
    assert policy._graded[1].sum() > 0


# --- errors that the tests above must find --------------------------------------------------------


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
    rng = CounterRNG(0, torch.arange(rows))
    ours = verify(SpeculativeSampling(), draft, Scores(logits, SAMPLING), rng)
    plain = verify(PlainSpeculative(), draft, Scores(logits, SAMPLING), rng)
    for name in ("accepted", "reached", "next_token"):
        assert (getattr(ours, name) == getattr(plain, name)).all()


# Errors that are enumerated too (`test_rules`, `test_cascade`), which finds them exactly.
ENUMERATED = (
    "residual of the wrong row",
    "bonus of the wrong row",
    "block ends at the first rejection",
    "distinct siblings, q not renormalised",
    "independent siblings judged as distinct",
    "mixed siblings of two models, one q for all",
    "mixed siblings of lookup and a model, one q for all",
    "a cascade's inner rule lossy",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "control",
    [
        pytest.param(one, marks=[pytest.mark.thorough] * (one.name in ENUMERATED), id=one.name)
        for one in CONTROLS
    ],
)
def test_errors_are_found(control: Control) -> None:
    """The same without the error is what the tests of laws decode."""
    found = control.find(control.faulty, 1)
    assert found.rejected, found


@pytest.mark.thorough
@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_without_the_error_nothing_is_found(control: Control) -> None:
    assert not control.find(control.sound, 0).rejected


# --- the same seed again --------------------------------------------------------------------------

# One of two tokens at each place, so that every text is counted.
PAIRWISE = replace(LONGER, prompts=LONGER.prompts[:1], eos=(), sampling=Sampling(1.0, top_k=2))


def texts_of_the_second_decode(drafter: Drafter, rule: str, rows: int) -> Fit:
    """All texts in one batch: a drafter must tell the rows apart to learn from them."""
    case, decoder = LONGER, LONGER.decoder(drafter, rule)
    prompts = [case.prompts[row % len(case.prompts)] for row in range(rows)]
    decoder.decode(prompts, case.new, seed=5)
    return fit_texts(decoder.decode(prompts, case.new, seed=5).outputs, case)


@pytest.mark.parametrize("drawn", [False, True])
def test_texts_with_a_seed_that_taught_the_drafter(drawn: bool) -> None:
    found = texts_of_the_second_decode(Remembering(LONGER.vocab, drawn=drawn), "speculative", 6_000)
    assert found.passes, found
    assert found.df > 60


@pytest.mark.parametrize("drawn", [False, True])
def test_the_same_numbers_for_drafts_that_they_taught_are_found(
    drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With chosen tokens judged like drawn ones, and with the numbers of the rounds before."""
    patched = "decode.loop.decoding.decided"
    monkeypatch.setattr(patched, lambda rule, *rest: rule.decide(*rest))
    drafter = Remembering(LONGER.vocab, drawn=drawn, remembers=False)
    found = texts_of_the_second_decode(drafter, "speculative", 6_000)
    assert not found.passes, found


class Timid(Remembering):
    """Drafts only where it remembers token 2."""

    def draft(self, contexts: Contexts, *rest: Any) -> Draft:
        draft = super().draft(contexts, *rest)
        draft.cut(np.where(self.last[self.rows, contexts.lengths] == 2, draft.sizes, 0))
        return draft


@pytest.mark.parametrize("remembers", [True, False])
def test_texts_with_a_seed_whose_plain_text_taught_the_drafter(remembers: bool) -> None:
    """A control: the drafter does not say that it learns. Then a token is plain if the same number
    gave another token than 2."""
    case = replace(PAIRWISE, new=4)
    prompts = [list(case.prompts[0])] * 4_000
    learnt = case.decoder(NoDrafter()).decode(prompts, case.new, seed=5).outputs
    texts = [prompt + output for prompt, output in zip(prompts, learnt, strict=True)]
    drafter = Timid(case.vocab, drawn=True, remembers=remembers)
    drafter.now = Contexts.of(texts, 32).tokens
    which = case.decoder(drafter, gamma=1)
    found = fit_texts(which.decode(prompts, case.new, seed=5).outputs, case)
    assert found.passes == remembers, found


@pytest.mark.parametrize("counted", [False, True])
def test_a_text_that_another_decode_continues_with_the_same_seed(
    counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control: numbers that count from the start of each decode give another law."""
    case = PAIRWISE
    texts = [list(case.prompts[0])] * 4_000
    uniforms, began = CounterRNG.uniforms, 0

    def from_the_start(rng: CounterRNG, *place: int) -> torch.Tensor:
        moved = copy.copy(rng)
        moved._lengths = rng._lengths - began
        return uniforms(moved, *place)

    if counted:
        monkeypatch.setattr(CounterRNG, "uniforms", from_the_start)
    which = case.decoder(small_lm(case=case), gamma=2)
    for _ in range(2):
        began = len(texts[0])
        outputs = which.decode(texts, case.new // 2, seed=5).outputs
        texts = [text + output for text, output in zip(texts, outputs, strict=True)]
    found = fit_texts([text[-case.new :] for text in texts], case)
    assert found.passes != counted, found
    assert found.df > 50
