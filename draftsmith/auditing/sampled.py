"""Are sampled texts drawn from the target's law? The randomised probability integral transform.

At each token, u = P(tokens before it in an order) + U·p(token), with p the target's law after the
text so far and U uniform. If and only if the engine draws from p, all u are uniform and
independent, in every order that is fixed before the token is drawn (Rosenblatt, 1952; Brockwell,
2007). The tests of sums compare how often a set of tokens is drawn with its probability: each
difference has mean 0 whatever came before, so their sum is a martingale.

Every test has the level of the audit divided by the number of tests (Bonferroni).
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.stats import chi2

from draftsmith.auditing.findings import Finding, Judgement
from draftsmith.auditing.tails import (
    martingale_tail,
    normal_tail,
    smallest_shift,
    smallest_variation,
)
from draftsmith.auditing.texts import ORDERS, SETS, JudgedText

GROUP = "sampled"
BINS = 10
POWER = 0.99
# With fewer tokens a sum is not yet normal at the levels in use.
FEWEST_TOKENS = 1000
_U_MEAN, _U_VARIANCE = 1 / 2, 1 / 12
ORDER_NAMES = {
    "likeliest": "u by probability",
    "proposed": "u, repeated n-grams first",
    "seen": "u, tokens of the text first",
}
SET_NAMES = {
    "likeliest": "the likeliest token",
    "proposed": "the token that continues a repeated n-gram",
    "seen": "tokens that are in the text already",
    "end": "the end of the text",
}


def sampled_findings(texts: Sequence[JudgedText], level: float) -> list[Finding]:
    """The findings about sampled texts. level: the probability that an engine without error is
    called wrong by any of them."""
    if few := too_few(texts):
        return [few]
    pairs = _pairs(texts)
    # Of the tests below: besides those of orders, sets and pairs there are three.
    each = level / (len(ORDERS) + len(SETS) + 3 + bool(pairs))
    findings = [support_finding(texts), *_uniformity(texts, each), _neighbours(texts, each)]
    findings += [_positions(texts, each), *_shares(texts, each), _temperature(texts, each)]
    return [*findings, _agreement(pairs, each)] if pairs else findings


def _tested(name: str, p: float, level: float, detail: str, sees: str) -> Finding:
    """See `Finding`. level: of this one test."""
    verdict = Judgement.WRONG if p < level else Judgement.EQUAL
    return Finding(GROUP, name, verdict, detail, p, sees)


def too_few(texts: Sequence[JudgedText]) -> Finding | None:
    """A finding that there are too few tokens to judge; None if there are enough."""
    count = sum(len(text.gap) for text in texts)
    if count >= FEWEST_TOKENS:
        return None
    detail = f"{count} tokens; expected at least {FEWEST_TOKENS}: ask for more texts"
    return Finding(GROUP, "law", Judgement.UNJUDGED, detail)


def support_finding(texts: Sequence[JudgedText]) -> Finding:
    """The finding about tokens that the request's filters remove."""
    count = sum(len(text.gap) for text in texts)
    outside = [(text, int(at)) for text in texts for at in np.flatnonzero(text.outside)]
    verdict = Judgement.WRONG if outside else Judgement.EQUAL
    detail = f"{len(outside)} of {count} tokens are among those that the request's filters remove"
    if outside:
        text, at = outside[0]
        detail += (
            f"; the first is token {text.text.tokens[at]} at place {at} of an answer to prompt "
            f"{text.text.number}"
        )
    return Finding(GROUP, "support", verdict, detail)


def _uniformity(texts: Sequence[JudgedText], level: float) -> list[Finding]:
    """χ² of u in equal bins, for each order."""
    findings = []
    for order, name in enumerate(ORDERS):
        u = np.concatenate([text.u[order] for text in texts])
        counts = np.bincount(np.minimum((u * BINS).astype(int), BINS - 1), minlength=BINS)
        due = len(u) / BINS
        statistic = float(((counts - due) ** 2 / due).sum())
        variation = float(np.abs(counts - due).sum() / (2 * len(u)))
        detail = f"{variation:.1%} of u misplaced, χ² {statistic:.1f} of {BINS} bins"
        sees = f"{smallest_variation(len(u), BINS, level, POWER):.1%} of u misplaced"
        p = float(chi2.sf(statistic, BINS - 1))
        findings.append(_tested(ORDER_NAMES[name], p, level, detail, sees))
    return findings


def _neighbours(texts: Sequence[JudgedText], level: float) -> Finding:
    """The correlation of u with the next u of a text."""
    centred = [text.u[0] - _U_MEAN for text in texts]
    products = np.concatenate([each[:-1] * each[1:] for each in centred])
    count = max(len(products), 1)
    correlation = float(products.sum()) / _U_VARIANCE / count
    p = normal_tail(correlation * math.sqrt(count))
    sees = f"a correlation of {smallest_shift(count, count, level, POWER):.3f}"
    return _tested("neighbours", p, level, f"correlation {correlation:+.4f}", sees)


def _positions(texts: Sequence[JudgedText], level: float) -> Finding:
    """The mean of u by position: the first token, the second, the next 2, the next 4, and on."""
    places = np.concatenate([np.arange(len(text.gap)) for text in texts])
    u = np.concatenate([text.u[0] for text in texts])
    groups = np.floor(np.log2(np.maximum(places, 1))).astype(int) + (places > 0)
    sizes = np.bincount(groups)
    sums = np.bincount(groups, u - _U_MEAN)
    statistic = float((sums**2 / (sizes * _U_VARIANCE)).sum())
    largest = int(np.argmax(np.abs(sums) / np.sqrt(sizes)))
    first = 0 if largest == 0 else 2 ** (largest - 1)
    mean = sums[largest] / sizes[largest]
    detail = (
        f"χ² {statistic:.1f} with {len(sizes)} degrees of freedom; most at place {first} and on, "
        f"where u has the mean 1/2 {mean:+.3f}"
    )
    least = int(sizes.min())
    shift = smallest_shift(least, least * _U_VARIANCE, level, POWER)
    sees = f"a mean of u that is {shift:.3f} off at one place" if shift < 0.5 else "little"
    return _tested("by position", float(chi2.sf(statistic, len(sizes))), level, detail, sees)


def _shares(texts: Sequence[JudgedText], level: float) -> list[Finding]:
    """How often a token of each set is drawn."""
    findings = []
    for which, name in enumerate(SETS):
        hit = np.concatenate([text.hit[which] for text in texts])
        due = np.concatenate([text.due[which] for text in texts])
        findings.append(_share(SET_NAMES[name], hit, due, level))
    return findings


def _temperature(texts: Sequence[JudgedText], level: float) -> Finding:
    """The mean log-probability of the drawn tokens."""
    surprise = np.concatenate([text.surprise for text in texts])
    variance = float(sum(text.surprise_variance.sum() for text in texts))
    z = float(surprise.sum()) / math.sqrt(variance) if variance > 0 else 0.0
    shift = smallest_shift(len(surprise), variance, level, POWER)
    sees = f"log-probabilities that are {shift:.3f} off in the mean"
    detail = f"tokens are {surprise.mean():+.4f} nats likelier in the mean than draws from the law"
    return _tested("temperature", normal_tail(z), level, detail, sees)


def _share(name: str, hit: np.ndarray, due: np.ndarray, level: float) -> Finding:
    """hit: float64 [n], 1 where a token of a set was drawn. due: its probability."""
    variance = float((due * (1 - due)).sum())
    p = martingale_tail(float((hit - due).sum()), variance)
    detail = f"drawn in {hit.mean():.2%} of the places, due in {due.mean():.2%}"
    sees = f"{smallest_shift(len(hit), variance, level, POWER):.1%} of the places"
    return _tested(name, p, level, detail, sees)


def _pairs(texts: Sequence[JudgedText]) -> list[tuple[JudgedText, JudgedText]]:
    """Pairs of answers to one prompt."""
    pairs = []
    waiting: dict[int, JudgedText] = {}
    for text in texts:
        other = waiting.pop(text.text.number, None)
        if other is None:
            waiting[text.text.number] = text
        else:
            pairs.append((other, text))
    return pairs


def _agreement(pairs: Sequence[tuple[JudgedText, JudgedText]], level: float) -> Finding:
    """Do two answers to one prompt agree more often than independent draws? Pairs are compared as
    far as they have the same text before."""
    same, due = [], []
    for one, two in pairs:
        for at, (a, b) in enumerate(zip(one.text.tokens, two.text.tokens, strict=False)):
            same.append(float(a == b))
            due.append(one.again[at])
            if a != b:
                break
    return _share("answers to one prompt agree", np.array(same), np.array(due), level)
