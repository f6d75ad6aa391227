"""Are the first tokens of sampled texts drawn from their joint law? By enumeration, and χ².

The law of the first tokens after a prompt is computed exactly, from forwards of the target without
a cache. So this finds an error of any form, also one that changes no single place by itself, as the
transform of `draftsmith.auditing.sampled` needs the tokens that an error favours to stand together
in one of its orders. It needs a small vocabulary, or few tokens that top-k leaves.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from scipy.stats import chi2

from decode.draw.sampling import Sampling
from decode.model.loading import Target
from draftsmith.auditing.findings import Finding, Judgement
from draftsmith.auditing.sampled import POWER
from draftsmith.auditing.tails import smallest_variation
from draftsmith.auditing.texts import EngineText
from train.measure.joint_law import chi_square, joint_laws

GROUP = "exact"
# Vocabularies so small are enumerated without being asked for.
TINY_VOCABULARY = 32
TEXTS = 8_192  # of all prompts, by default
PROMPTS = 4  # as few, so that the texts of one prompt fill its bins
ANSWERS_EACH = 4  # of one request, where the server gives several

Laws = list[dict[tuple[int, ...], float]]


def random_prompts(target: Target, count: int) -> list[list[int]]:
    """Prompts for a tiny vocabulary: 8 tokens each, none of them an end of text."""
    tokens = [i for i in range(target.token_count) if i not in target.eos_token_ids]
    return np.random.default_rng(0).choice(tokens, (count, 8)).tolist()


def exact_laws(
    target: Target, prompts: Sequence[Sequence[int]], sampling: Sampling, tokens: int
) -> list[Laws]:
    """For each prompt, the laws of the first 1, 2, …, `tokens` tokens. Raises UserError if there
    are too many texts."""
    return [
        joint_laws(
            target.model,
            prompt,
            tokens,
            sampling,
            ends=target.eos_token_ids,
            token_count=target.token_count,
        )
        for prompt in prompts
    ]


def exact_findings(
    texts: Sequence[EngineText], laws: Sequence[Laws], level: float
) -> list[Finding]:
    """A finding for each number of first tokens, and one about texts that the law excludes.

    texts: whole ones, of at most as many tokens as the laws have. level: the probability that an
    engine without error is called wrong by any finding. Each test has the level divided by their
    number (Bonferroni).
    """
    answers: list[list[tuple[int, ...]]] = [[] for _ in laws]
    for text in texts:
        answers[text.number].append(tuple(text.tokens))
    depths = range(1, len(laws[0]) + 1)
    each = level / len(depths)
    return [_possible(answers, laws), *(_law_of(answers, laws, depth, each) for depth in depths)]


def _possible(answers: Sequence[Sequence[tuple[int, ...]]], laws: Sequence[Laws]) -> Finding:
    """Filters cut where rounding may move the border, so a few texts beyond it say nothing."""
    outside = [
        text for given, law in zip(answers, laws, strict=True) for text in given
        if text not in law[-1]
    ]  # fmt: skip
    count = sum(map(len, answers))
    verdict = Judgement.WRONG if len(outside) > count / 1000 else Judgement.EQUAL
    detail = f"{len(outside)} of {count} texts have the probability 0"
    if outside:
        detail += f"; the first is {list(outside[0])}"
    return Finding(GROUP, "support", verdict, detail, sees="1 of 1,000 texts")


def _law_of(
    answers: Sequence[Sequence[tuple[int, ...]]], laws: Sequence[Laws], depth: int, level: float
) -> Finding:
    """The finding about the first `depth` tokens. The χ² of the prompts add up."""
    name = "the first token" if depth == 1 else f"the first {depth} tokens together"
    statistic, freedom, count = 0.0, 0, 0
    for given, law in zip(answers, laws, strict=True):
        expected = law[depth - 1]
        found = Counter(text[:depth] for text in given)
        total = sum(found[text] for text in expected)
        counts = np.array([found[text] for text in expected], dtype=np.float64)
        due = np.array([*expected.values()]) * total
        one, more = chi_square(counts, due)
        statistic, freedom, count = statistic + one, freedom + more, count + total
    if not freedom:
        detail = f"{count} texts; expected more of them, so that more than one bin is full"
        return Finding(GROUP, name, Judgement.UNJUDGED, detail)
    p = float(chi2.sf(statistic, freedom))
    detail = f"χ² {statistic:.1f} of {count} texts with {freedom} degrees of freedom"
    smallest = smallest_variation(count, freedom + 1, level, POWER)
    verdict = Judgement.WRONG if p < level else Judgement.EQUAL
    return Finding(GROUP, name, verdict, detail, p, f"{smallest:.1%} of texts misplaced")
