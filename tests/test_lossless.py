"""Promises 21 and 22: sampled text has exactly the target's distribution, and these tests can tell.

The rules alone are enumerated in `test_rules`; here the whole loop is sampled, once for each rule
and each kind of draft that it judges. `python -m tests.controls` prints how surely errors are
found.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from decode.draft import Contexts, Draft, Limits
from decode.drafters import Drafter, NoDrafter
from decode.drafters.lookup.lookahead import LookaheadDrafter
from decode.drafters.lookup.max_gram import MaxGramDrafter
from decode.drafters.lookup.ngram import NgramDrafter, StoreDrafter
from decode.drafters.lookup.suffix import SuffixDrafter
from decode.drafters.several.cascade import HorizontalCascade, VerticalCascade
from decode.drafters.several.combined import CompositeDrafter
from decode.drafters.several.measured import MeasuredComposite
from decode.drafters.several.routed import RoutedDrafter
from decode.drafters.skip import SkipDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.drafters.sparse import SparseDrafter
from decode.drafters.swift import SwiftDrafter
from decode.draw.sampling import CounterRNG, Sampling, draw
from decode.loop import step
from decode.loop.decoding import Decoder
from decode.rules import RULES
from decode.rules.speculative import SpeculativeSampling
from decode.shapes import SHAPES, Chain
from decode.verdict import Scores
from decode.verification import Verification
from tests.controls import CONTROLS, Control
from tests.lossless import (
    DEEPER,
    LONGER,
    PENALISED,
    PROCESSED,
    SAMPLING,
    VOCAB,
    Case,
    Fit,
    FixedDraft,
    Pairs,
    Remembering,
    Watched,
    decode,
    decode_runs,
    fit_texts,
    looked_up,
    lookup_and_cascade,
    merged,
    parallel_lm,
    small_lm,
    through_transformers,
)
from tests.mutants import PlainSpeculative
from tests.other_tokenizers import shared_small_lm, text_small_lm
from tests.tiny import verify

ROWS = 500_000


def few_slots() -> SparseDrafter:
    """The target over so few of its keys and values that it is often wrong."""
    return SparseDrafter(sinks=1, recent=1, chunk=1, budget=3, every=2)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "drawn chain": small_lm,
    "looked up chain": lambda: NgramDrafter(1, 2),
    # Likely and unlikely tokens at each depth.
    "fixed chain": lambda: FixedDraft((0, 1)),
    "fixed tree": lambda: FixedDraft((5, 0, 9, 3, 1, 0), (-1, -1, 0, 0, 1, 1)),
    "chosen": lambda: small_lm("chosen"),
    "independent": lambda: small_lm("independent"),
    "distinct": lambda: small_lm("distinct"),
    "self-drafted chain": lambda: SkipDrafter(attention=0),
    "self-drafted tree": lambda: SkipDrafter(attention=0).with_shape(Pairs("distinct")),
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
        ("coupled", "drawn chain", ROWS // 4),
        ("coupled", "fixed tree", ROWS // 4),
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
        ("speculative", "self-drafted chain", ROWS // 5),
        ("multi_round", "self-drafted tree", ROWS // 5),
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


def vertical(case: Case, **options: Any) -> VerticalCascade:
    """A cascade whose inner drafts are often wrong."""
    inner = SmallLMDrafter(case.model(0.6))
    return VerticalCascade(small_lm(case=case), inner, **({"gamma": 2} | options))


def shaped(case: Case, shape: str, **options: Any) -> Drafter:
    return small_lm(case=case).with_shape(SHAPES[shape](**options))


# How each drafts in a case.
LONGER_DRAFTERS: dict[str, Callable[[Case], Drafter]] = {
    "drawn chain": lambda case: small_lm(case=case),
    "independent": lambda case: small_lm("independent", case),
    "distinct": lambda case: small_lm("distinct", case),
    "the likeliest paths": lambda case: shaped(case, "dynamic", width=4, nodes=40),
    "two chains": lambda case: shaped(case, "chains", chains=2, budget=6),
    "planned tree": lambda case: shaped(case, "sequoia", acceptance=[0.5, 0.3, 0.1], nodes=6),
    "measured tree": lambda case: shaped(
        case, "calibrated", table=[[0.6, 0.3], [0.5, 0.2], [0.4, 0.1]], nodes=6, draw="independent"
    ),
    "self-drafted chain": lambda case: SkipDrafter(attention=1),
    "first layers": lambda case: SkipDrafter(exit=1),
    "self-drafted tree": lambda case: SkipDrafter(mlp="0").with_shape(Pairs("distinct")),
    "chain over a part of the text": lambda case: few_slots(),
    "tree over a part of the text": lambda case: few_slots().with_shape(Pairs("distinct")),
    "vertical over a part of the text": lambda case: VerticalCascade(
        few_slots(), small_lm(case=case), gamma=2
    ),
    "shared tokens": shared_small_lm,
    "text": text_small_lm,
    "pairs of shared tokens": lambda case: shared_small_lm(case).with_shape(Pairs("distinct")),
    "parallel chain": lambda case: parallel_lm(case=case),
    "parallel tree": lambda case: parallel_lm("distinct", case),
    "lookup or model": lambda case: CompositeDrafter([NgramDrafter(1, 2), small_lm(case=case)]),
    "vertical": lambda case: vertical(case),
    "vertical in blocks": lambda case: vertical(case, rule="block", rounds=1),
    "vertical of three": lambda case: VerticalCascade(small_lm(case=case), vertical(case), gamma=2),
    "horizontal": lambda case: HorizontalCascade(small_lm(case=case), NgramDrafter(1, 2), depth=2),
    "horizontal models": lambda case: HorizontalCascade(
        small_lm(case=case), SmallLMDrafter(case.model(0.6)), depth=1
    ),
    "lookup or horizontal": lambda case: CompositeDrafter(lookup_and_cascade(case)),
    "measured": lambda case: MeasuredComposite(
        [NgramDrafter(1, 2), small_lm(case=case)], [0.0, 0.1], memory=0.5
    ),
    "routed": lambda case: RoutedDrafter(
        [small_lm(case=case), NgramDrafter(1, 2)], lambda text: int(text[0]) % 2
    ),
    "changing layers": lambda case: SwiftDrafter(window=4, every=2),
    "tree by changing layers": lambda case: SwiftDrafter(window=4, every=2).with_shape(
        Pairs("distinct")
    ),
    "longest match": lambda case: MaxGramDrafter(),
    "texts of all rows": lambda case: StoreDrafter(1, 2),
    "suffix": lambda case: SuffixDrafter(min_token_prob=0.0, max_spec_factor=4.0),
    "suffix tree": lambda case: SuffixDrafter(tree_nodes=6, min_token_prob=0.0, max_spec_offset=5),
    "datastore": lambda case: looked_up(case),
    "chain of a datastore": lambda case: looked_up(case).with_shape(Chain()),
    "lookahead": lambda case: LookaheadDrafter(3, 4, 3),
    "merged models": lambda case: merged(SmallLMDrafter(case.model(0.6)), case=case),
    "merged with lookup": lambda case: merged(NgramDrafter(1, 2), case=case),
}
CASES = {
    "plain": LONGER,
    "penalised": PENALISED,
    "processed": PROCESSED,
    "deeper": DEEPER,
    "through transformers": through_transformers(LONGER),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "drafter", "case", "rows"),
    [
        ("speculative", "drawn chain", "plain", 20_000),
        ("speculative", "drawn chain", "through transformers", 12_000),
        ("traversal", "distinct", "through transformers", 12_000),
        ("traversal", "the likeliest paths", "plain", 12_000),
        ("spectr", "two chains", "plain", 12_000),
        ("multi_round", "planned tree", "plain", 12_000),
        ("traversal", "measured tree", "plain", 12_000),
        ("speculative", "self-drafted chain", "plain", 20_000),
        ("speculative", "first layers", "deeper", 12_000),
        ("traversal", "self-drafted tree", "plain", 12_000),
        ("speculative", "chain over a part of the text", "plain", 20_000),
        ("traversal", "tree over a part of the text", "plain", 20_000),
        ("block", "vertical over a part of the text", "plain", 20_000),
        ("speculative", "lookup or model", "plain", 20_000),
        ("speculative", "vertical", "plain", 20_000),
        ("speculative", "vertical in blocks", "plain", 20_000),
        ("block", "vertical in blocks", "plain", 20_000),
        ("traversal", "vertical of three", "plain", 12_000),
        ("coupled", "vertical", "penalised", 12_000),
        ("block", "vertical", "penalised", 20_000),
        ("speculative", "horizontal", "plain", 20_000),
        ("block", "horizontal models", "penalised", 12_000),
        ("speculative", "lookup or horizontal", "plain", 12_000),
        ("speculative", "measured", "plain", 12_000),
        ("speculative", "routed", "plain", 12_000),
        ("speculative", "changing layers", "deeper", 12_000),
        ("traversal", "tree by changing layers", "deeper", 12_000),
        ("speculative", "longest match", "plain", 6_000),
        ("speculative", "texts of all rows", "plain", 6_000),
        ("speculative", "shared tokens", "plain", 20_000),
        ("block", "shared tokens", "penalised", 12_000),
        ("speculative", "text", "penalised", 12_000),
        ("traversal", "pairs of shared tokens", "plain", 12_000),
        ("block", "drawn chain", "plain", 20_000),
        ("speculative", "parallel chain", "plain", 20_000),
        ("traversal", "parallel tree", "plain", 12_000),
        ("spectr", "independent", "plain", 12_000),
        ("traversal", "distinct", "plain", 12_000),
        ("multi_round", "merged models", "plain", 12_000),
        ("multi_round", "merged with lookup", "plain", 12_000),
        ("traversal", "merged models", "plain", 12_000),
        ("traversal", "merged with lookup", "plain", 12_000),
        ("exact", "merged models", "plain", 10_000),
        ("coupled", "drawn chain", "plain", 20_000),
        ("coupled", "lookup or model", "penalised", 12_000),
        ("block", "drawn chain", "penalised", 20_000),
        ("multi_round", "merged models", "penalised", 12_000),
        ("traversal", "merged with lookup", "processed", 3_000),
        ("speculative", "suffix", "plain", 12_000),
        ("multi_round", "suffix tree", "plain", 12_000),
        ("multi_round", "datastore", "plain", 12_000),
        ("traversal", "datastore", "plain", 12_000),
        ("speculative", "chain of a datastore", "plain", 12_000),
        ("multi_round", "lookahead", "penalised", 12_000),
        ("exact", "lookahead", "penalised", 12_000),
    ],
)
def test_ragged_texts_of_many_rounds(rule: str, drafter: str, case: str, rows: int) -> None:
    """Prompts of different lengths, drafts four deep, and texts that end inside a block."""
    judge = RULES[rule]()
    drawn = LONGER_DRAFTERS[drafter](CASES[case])
    found, runs = decode_runs(drawn, judge, rows=rows, case=CASES[case])
    assert found.passes, found
    assert found.df > 60
    counts = runs[0].counts
    assert counts.by_accepted[3:].sum() / counts.steps > 0.001
    assert len(runs[0].steps) >= 4
    if CASES[case].eos:
        cut = sum(int((step.emitted <= step.accepted).sum()) for step in runs[0].steps)
        assert cut / rows > 0.02


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


@pytest.mark.slow
@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_errors_are_found(control: Control) -> None:
    assert not control.find(control.sound, 0).rejected
    found = [control.find(control.faulty, seed) for seed in range(5)]
    assert all(each.rejected for each in found), found


# --- the same seed again --------------------------------------------------------------------------

# One of two tokens at each place, so that every text is counted.
PAIRWISE = replace(LONGER, prompts=LONGER.prompts[:1], eos=(), sampling=Sampling(1.0, top_k=2))


def texts_of_the_second_decode(drafter: Drafter, rule: str, rows: int) -> Fit:
    """All texts in one batch: a drafter must tell the rows apart to learn from them."""
    case = LONGER
    decoder = Decoder(
        case.model(0.0),
        drafter,
        eos_token_ids=case.eos,
        gamma=case.gamma,
        rule=rule,
        sampling=case.sampling,
    )
    prompts = [case.prompts[row % len(case.prompts)] for row in range(rows)]
    decoder.decode(prompts, case.new, seed=5)
    return fit_texts(decoder.decode(prompts, case.new, seed=5).outputs, case)


@pytest.mark.parametrize("rule", ["speculative", "block", "multi_round", "traversal"])
@pytest.mark.parametrize("drawn", [False, True])
def test_texts_with_a_seed_that_taught_the_drafter(drawn: bool, rule: str) -> None:
    found = texts_of_the_second_decode(Remembering(LONGER.vocab, drawn=drawn), rule, 6_000)
    assert found.passes, found
    assert found.df > 60


@pytest.mark.parametrize("drawn", [False, True])
def test_the_same_numbers_for_drafts_that_they_taught_are_found(
    drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With chosen tokens judged like drawn ones, and with the numbers of the rounds before."""
    monkeypatch.setattr(step, "decided", lambda rule, *rest: rule.decide(*rest))
    drafter = Remembering(LONGER.vocab, drawn=drawn, remembers=False)
    found = texts_of_the_second_decode(drafter, "speculative", 6_000)
    assert not found.passes, found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["store", "max_gram", "suffix", "swift", "store, then a model", "learning"]
)
def test_drafters_that_learn_meet_the_same_seed_again(name: str) -> None:
    """Each text alone, decoded twice by a new drafter."""
    case = replace(DEEPER if name == "swift" else LONGER, prompts=LONGER.prompts[:1])
    texts = []
    for seed in range(2_000):
        drafter = LEARNERS[name](case)
        decoder = Decoder(
            case.model(0.0),
            drafter,
            eos_token_ids=case.eos,
            gamma=case.gamma,
            sampling=case.sampling,
        )
        for _ in range(2):
            text = decoder.decode(case.prompts, case.new, seed=seed).outputs[0]
        texts.append(text)
    found = fit_texts(texts, case)
    print(name, found)
    assert found.passes, found


class Timid(Remembering):
    """Drafts only where it remembers token 2."""

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, noise: CounterRNG
    ) -> Draft:
        draft = super().draft(contexts, limits, sampling, noise)
        draft.cut(np.where(self.last[self.rows, contexts.lengths] == 2, draft.sizes, 0))
        return draft


@pytest.mark.parametrize("remembers", [True, False])
def test_texts_with_a_seed_whose_plain_text_taught_the_drafter(remembers: bool) -> None:
    """A control: the drafter does not say that it learns. Then a token is plain if the same number
    gave another token than 2."""
    case = replace(PAIRWISE, new=4)
    prompts = [list(case.prompts[0])] * 4_000
    plain = Decoder(case.model(0.0), NoDrafter(), sampling=case.sampling)
    learnt = plain.decode(prompts, case.new, seed=5).outputs
    texts = [prompt + output for prompt, output in zip(prompts, learnt, strict=True)]
    drafter = Timid(case.vocab, drawn=True, remembers=remembers)
    drafter.now = Contexts.of(texts, 32).tokens
    which = Decoder(case.model(0.0), drafter, gamma=1, sampling=case.sampling)
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
    which = Decoder(case.model(0.0), small_lm(case=case), gamma=2, sampling=case.sampling)
    for _ in range(2):
        began = len(texts[0])
        outputs = which.decode(texts, case.new // 2, seed=5).outputs
        texts = [text + output for text, output in zip(texts, outputs, strict=True)]
    found = fit_texts([text[-case.new :] for text in texts], case)
    assert found.passes != counted, found
    assert found.df > 50


class Taught(SmallLMDrafter):
    """After each decode its weights make what was emitted likelier."""

    learning = True

    def observe(self, verification: Verification) -> None:
        super().observe(verification)
        with torch.no_grad():
            for row, count in enumerate(verification.emitted.tolist()):
                for token in verification.block[row, :count]:
                    self.lm.model.get_output_embeddings().weight[int(token)] *= 1.2


@functools.cache
def _pupil(make: Callable[[float], Any]) -> Any:
    return copy.deepcopy(make(0.2))


def untaught(make: Callable[[float], Any]) -> Any:
    """One model for all drafters, with its first weights again: a copy would be tried each time."""
    pupil = _pupil(make)
    pupil.load_state_dict(make(0.2).state_dict())
    return pupil


LEARNERS: dict[str, Callable[[Case], Drafter]] = {
    "store": lambda case: StoreDrafter(1, 3),
    "max_gram": lambda case: MaxGramDrafter(),
    "suffix": lambda case: SuffixDrafter(),
    "swift": lambda case: SwiftDrafter(window=2, max_trials=4),
    "store, then a model": lambda case: CompositeDrafter([StoreDrafter(2, 3), small_lm(case=case)]),
    "learning": lambda case: Taught(untaught(case.model)),
}
