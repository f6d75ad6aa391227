"""The statistics of `draftsmith audit`, on texts that numpy draws."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats

from decode.draw.sampling import Sampling
from draftsmith.auditing import tails
from draftsmith.auditing.beside import beside_findings
from draftsmith.auditing.findings import Judgement
from draftsmith.auditing.sampled import sampled_findings
from draftsmith.auditing.texts import EngineText, JudgedText, TextJudge, proposed


def test_rare_events_are_bounded() -> None:
    """Of a Poisson number of events the normal tail is far too small. The bound is not."""
    for events in (8, 12, 16):
        exact = scipy_stats.poisson.sf(events - 1, 2.0)
        assert exact < tails.martingale_tail(events - 2.0, 2.0)
        assert tails.normal_tail((events - 2.0) / 2.0**0.5) < exact


def test_the_smallest_variation_is_found_with_its_power() -> None:
    """The worst form of an error of this size: all bins are off by the same amount."""
    bins, count, level = 10, 5000, 1e-4
    size = tails.smallest_variation(count, bins, level, power=0.9)
    law = np.full(bins, 1 / bins) + np.tile([1, -1], bins // 2) * 2 * size / bins
    assert np.abs(law - 1 / bins).sum() / 2 == pytest.approx(size)
    drawn = np.random.default_rng(0).multinomial(count, law, 4000)
    statistics = ((drawn - count / bins) ** 2 / (count / bins)).sum(1)
    found = (statistics > scipy_stats.chi2.isf(level, bins - 1)).mean()
    assert found == pytest.approx(0.9, abs=0.02)


VOCAB, START, TEXTS, LENGTH = 24, 4, 60, 30
TABLE = np.random.default_rng(1).normal(size=(VOCAB, VOCAB)).astype(np.float32) * 2


def bigrams() -> Any:
    """A target whose next token depends on the last one only, for texts that are drawn by numpy."""

    def forward(input_ids: torch.Tensor, logits_to_keep: int) -> Any:
        return SimpleNamespace(logits=torch.from_numpy(TABLE)[input_ids[:, -logits_to_keep:]])

    return SimpleNamespace(
        model=forward, device=torch.device("cpu"), token_count=VOCAB, eos_token_ids=(0,)
    )


def law(logits: np.ndarray, sampling: Sampling, text: Sequence[int]) -> np.ndarray:
    """float64 [V], by numpy alone."""
    logits = logits.astype(np.float64)
    for token in set(text):
        strong = sampling.repetition_penalty
        logits[token] *= strong if logits[token] < 0 else 1 / strong
    for token in text[START:]:
        logits[token] -= sampling.frequency_penalty
    for token in set(text[START:]):
        logits[token] -= sampling.presence_penalty
    order = np.argsort(-logits, kind="stable")
    if sampling.top_k:
        logits[order[sampling.top_k :]] = -np.inf
    p = np.exp((logits - logits.max()) / sampling.temperature)
    p /= p.sum()
    p[order[np.cumsum(p[order]) - p[order] >= sampling.top_p]] = 0
    return np.asarray(p / p.sum())


Drawing = Callable[[np.ndarray, Sequence[int], np.random.Generator], int]


def honest(sampling: Sampling) -> Drawing:
    return lambda logits, text, rng: int(rng.choice(VOCAB, p=law(logits, sampling, text)))


def judged(draw: Drawing, sampling: Sampling, seed: int) -> list[JudgedText]:
    rng = np.random.default_rng(seed)
    judge = TextJudge(bigrams(), sampling, seed, torch.float32)
    found = []
    for number in range(TEXTS):
        prompt = np.random.default_rng(number // 2).integers(0, VOCAB, START).tolist()
        text = list(prompt)
        for _ in range(LENGTH):
            text.append(draw(TABLE[text[-1]].copy(), text, rng))
        found.append(judge.judge(EngineText(number // 2, prompt, text[START:])))
    return found


SAMPLINGS = (
    Sampling(1.0),
    Sampling(0.7, top_k=8),
    Sampling(1.3, top_p=0.8),
    Sampling(0.9, repetition_penalty=1.3),
    Sampling(0.9, presence_penalty=0.8, frequency_penalty=0.4),
)


@pytest.mark.parametrize(
    "seed",
    [
        *range(len(SAMPLINGS)),
        *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(len(SAMPLINGS), 20)),
    ],
)
def test_honest_draws_pass(seed: int) -> None:
    sampling = SAMPLINGS[seed % len(SAMPLINGS)]
    findings = sampled_findings(judged(honest(sampling), sampling, seed), level=1e-3)
    assert {finding.verdict for finding in findings} == {Judgement.EQUAL}, findings


def wrong(draw: Drawing, sampling: Sampling) -> set[str]:
    """The names of the tests that find an error."""
    findings = sampled_findings(judged(draw, sampling, 0), level=1e-3)
    return {finding.name for finding in findings if finding.verdict is Judgement.WRONG}


def accepts_lookups(logits: np.ndarray, text: Sequence[int], rng: np.random.Generator) -> int:
    """Takes what a lookup proposes too often."""
    proposal = int(proposed(text, [0])[0])
    if proposal >= 0 and rng.random() < 0.15:
        return proposal
    return honest(Sampling(1.0))(logits, text, rng)


def test_errors_of_draws_are_found() -> None:
    plain, cut = Sampling(1.0), Sampling(1.5, top_p=0.7)
    assert "temperature" in wrong(honest(Sampling(0.8)), plain)
    assert "the token that continues a repeated n-gram" in wrong(accepts_lookups, plain)
    assert "support" in wrong(honest(plain), cut)
    # Top-p before the temperature keeps other tokens.
    before = law_before(cut)
    assert wrong(lambda z, text, rng: int(rng.choice(VOCAB, p=before(z))), cut)
    for penalised in (Sampling(1.0, repetition_penalty=1.5), Sampling(1.0, presence_penalty=0.6)):
        assert "tokens that are in the text already" in wrong(honest(plain), penalised)


def law_before(sampling: Sampling) -> Callable[[np.ndarray], np.ndarray]:
    def of(logits: np.ndarray) -> np.ndarray:
        kept = law(logits, replace(sampling, temperature=1.0), ()) > 0
        p = np.where(kept, np.exp((logits - logits.max()) / sampling.temperature), 0)
        return np.asarray(p / p.sum())

    return of


def test_numbers_that_are_used_twice_are_found() -> None:
    """Each token has the right law, but the texts are not independent."""

    def inverse(logits: np.ndarray, uniform: float) -> int:
        order = np.argsort(-logits, kind="stable")
        return int(
            order[np.searchsorted(np.cumsum(law(logits, Sampling(1.0), ())[order]), uniform)]
        )

    def of_place(logits: np.ndarray, text: Sequence[int], rng: np.random.Generator) -> int:
        """The same numbers for every answer to a prompt."""
        place = (len(text), *text[:START])
        return inverse(logits, np.random.default_rng(place).random())

    assert "answers to one prompt agree" in wrong(of_place, Sampling(1.0))
    numbers: list[float] = []

    def in_pairs(logits: np.ndarray, text: Sequence[int], rng: np.random.Generator) -> int:
        if len(text) % 2 == 0:
            numbers.append(rng.random())
        return inverse(logits, numbers[-1])

    assert "neighbours" in wrong(in_pairs, Sampling(1.0))


def test_a_penalised_and_filtered_law_is_that_of_transformers() -> None:
    sampling = Sampling(
        0.8, top_k=9, top_p=0.9, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3
    )
    text = EngineText(0, [3, 5, 3, 2], [7, 1, 7, 1, 5])
    found = TextJudge(bigrams(), sampling, 0, torch.float32).judge(text)
    for place, token in enumerate(text.tokens):
        before = [*text.prompt, *text.tokens[:place]]
        p = law(TABLE[before[-1]].copy(), sampling, before)
        ahead = p[(p > p[token])].sum()
        assert ahead - 1e-6 <= found.u[0, place] <= ahead + p[token] + 1e-6
        assert found.due[2, place] == pytest.approx(p[sorted(set(before))].sum(), abs=1e-6)
        assert found.outside[place] == (p[token] == 0)


def test_lookups_propose_what_followed_the_longest_repetition() -> None:
    assert proposed([1, 2, 3, 9, 2, 3], [8, 1, 2]).tolist() == [9, -1, 2]


def test_beside_a_baseline_only_what_drafts_change_is_found() -> None:
    """Both servers have weights that are not the target's."""
    asked, theirs = Sampling(1.0), honest(Sampling(0.8))

    def with_lookups(logits: np.ndarray, text: Sequence[int], rng: np.random.Generator) -> int:
        proposal = int(proposed(text, [0])[0])
        return proposal if proposal >= 0 and rng.random() < 0.3 else theirs(logits, text, rng)

    baseline = judged(theirs, asked, 1)
    same = beside_findings(judged(theirs, asked, 2), baseline, level=1e-3)
    assert {finding.verdict for finding in same} == {Judgement.EQUAL}, same
    found = beside_findings(judged(with_lookups, asked, 2), baseline, level=1e-3)
    wrong = {finding.name for finding in found if finding.verdict is Judgement.WRONG}
    assert "beside the baseline: the token that continues a repeated n-gram" in wrong


def test_the_test_beside_a_baseline_has_its_level() -> None:
    """p-values of answers from one law are uniform, also of answers with different lengths."""
    rng = np.random.default_rng(0)
    values = []
    for _ in range(60):
        numbers = np.repeat(np.arange(4), 6).tolist()
        one, two = ([_random_text(number, rng) for number in numbers] for _ in range(2))
        values += [finding.p for finding in beside_findings(one, two, level=1e-3)]
    shares = [np.mean(np.array(values) < p) for p in (0.1, 0.01)]
    assert shares == pytest.approx([0.1, 0.01], abs=0.04)


def _random_text(number: int, rng: np.random.Generator) -> JudgedText:
    count = int(rng.integers(40, 60))
    nothing = np.zeros(count)
    hit = (rng.random((4, count)) < 0.3).astype(float)
    return JudgedText(
        EngineText(number, (), ()), nothing, nothing, nothing, nothing > 0,
        rng.random((3, count)) ** 1.5, hit, hit, rng.normal(size=count), nothing, nothing, nothing,
        nothing,
    )  # fmt: skip
