"""Which hypothesis explains an engine's counts? One for the drafter as it is, one a mistake.

The prompts are the same there and here, and texts are greedy. Under the right hypothesis the counts
of a prompt are therefore equal, but for rounding. So a prompt's counts are those that the
hypothesis says with probability 1 − ε, and else those of some prompt of it. ε is not known, and
averaged over. That nothing known explains the counts is a hypothesis too: they are then spread as
they are, whatever is said here.

An engine that accepts almost nothing says no more than that: the counts of its prompts are all
alike. What is compared then is how many prompts have an accepted token, there and under each
mistake. All mistakes that accept as little are named together.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import betaln, gammaln, logsumexp

EQUAL, NONE = "equal", "none"
# ε, the share of prompts whose counts rounding changes.
ROUNDED = np.array([0.003, 0.01, 0.03, 0.06, 0.1, 0.15])
# A hypothesis is named only if at least this share of the prompts has the counts that it says.
LEAST_AGREEMENT = 0.8
# A hypothesis that says the counts of so many prompts needs no second mistake.
ALONE = 0.99
LEAST_POSTERIOR = 0.99
EQUAL_PRIOR, NONE_PRIOR = 0.7, 0.1
# An engine accepts almost nothing if at most this share of the prompts has an accepted token.
LITTLE = 0.05
# How well our own share says the engine's then: as well as so many prompts would. One mistake is
# made in more than one way, and each accepts other tokens by chance.
WORTH = 40.0
LEAST_LITTLE_POSTERIOR = 0.9
LEAST_LIKELIHOOD = 0.05  # of the likeliest, of what is named together with it
SEEN = 5.0  # how much likelier a mistake is in an engine in which it was seen


@dataclass(frozen=True)
class Explanation:
    """verdict: "equal", "none", or the name of a mistake. like: other mistakes that say the same of
    every prompt, or, if `little`, that accept as little as the engine, which accepts almost
    nothing. posterior: of the verdict and of those like it. agreement: {hypothesis: share of the
    prompts whose counts it says}. unseen: the mistakes that change nothing on these prompts."""

    verdict: str
    like: tuple[str, ...]
    posterior: float
    agreement: dict[str, float]
    unseen: tuple[str, ...]
    little: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The mistakes that may be it; none for "equal" and "none"."""
        return () if self.verdict in (EQUAL, NONE) else (self.verdict, *self.like)


def as_keys(accepted: np.ndarray) -> list[tuple[int, ...]]:
    """What is compared of each prompt. accepted: tokens by place, int [N, γ], or [N, 1] in all."""
    return [tuple(x) for x in accepted.tolist()]


def explain(
    counted: Sequence[tuple[int, ...]],
    said: Mapping[str, Sequence[tuple[int, ...]]],
    weights: Mapping[str, float],
) -> Explanation:
    """Choose a hypothesis. counted: of each prompt, the engine's counts. said: the same of each
    hypothesis, "equal" among them. weights: relative prior weights of the mistakes."""
    groups: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for name in sorted(said, key=lambda name: (name != EQUAL, name)):
        groups.setdefault(tuple(said[name]), []).append(name)
    unseen = tuple(groups[tuple(said[EQUAL])][1:])
    kinds = len({*counted, *(x for values in said.values() for x in values)}) + 1
    total = sum(weights.get(name, 1.0) for name in said if name != EQUAL) or 1.0
    scores: dict[str, float] = {}
    agreement: dict[str, float] = {}
    for values, names in groups.items():
        spread, count = Counter(values), len(values)
        other = np.array([(spread[x] + 0.5) / (count + 0.5 * kinds) for x in counted])
        same = np.array([x == y for x, y in zip(counted, values, strict=True)])
        by_share = np.log((1 - ROUNDED[:, None]) * same + ROUNDED[:, None] * other).sum(1)
        prior = (
            EQUAL_PRIOR
            if names[0] == EQUAL
            else (1 - EQUAL_PRIOR - NONE_PRIOR) * sum(weights.get(x, 1.0) for x in names) / total
        )
        scores[names[0]] = float(logsumexp(by_share) - np.log(len(ROUNDED)) + np.log(prior))
        agreement |= dict.fromkeys(names, float(same.mean()))
    found = np.array([*Counter(counted).values()])
    spread_alone = gammaln(kinds / 2) - gammaln(len(counted) + kinds / 2)
    spread_alone += (gammaln(found + 0.5) - gammaln(0.5)).sum()
    none = float(spread_alone + np.log(NONE_PRIOR))
    likeliest = max(scores, key=lambda name: scores[name])
    # Counts that are all alike look like chance. They are the drafter's if it has them here too.
    if likeliest != EQUAL or agreement[EQUAL] < ALONE or not any(map(any, counted)):
        scores[NONE] = none
    best = max(scores, key=lambda name: scores[name])
    posterior = float(np.exp(scores[best] - logsumexp([*scores.values()])))
    weak = best == NONE or agreement[best] < LEAST_AGREEMENT or posterior < LEAST_POSTERIOR
    if weak or (best != EQUAL and not any(map(any, counted))):
        little = _little(counted, said, weights, agreement, unseen)
        if little is not None:
            return little
        best = NONE
        posterior = float(np.exp(none - logsumexp([*(scores | {NONE: none}).values()])))
    like = next((tuple(x[1:]) for x in groups.values() if x[0] == best), ())
    return Explanation(best, () if best == EQUAL else like, posterior, agreement, unseen)


def _little(
    counted: Sequence[tuple[int, ...]],
    said: Mapping[str, Sequence[tuple[int, ...]]],
    weights: Mapping[str, float],
    agreement: dict[str, float],
    unseen: tuple[str, ...],
) -> Explanation | None:
    """Of an engine that accepts almost nothing, the mistakes that do so, too; None: another engine,
    or no mistake does. The likelihood is beta-binomial in the prompts with an accepted token."""
    there = sum(map(any, counted))
    if there > LITTLE * len(counted):
        return None
    names = [name for name in said if name not in unseen]
    total = sum(weights.get(name, 1.0) for name in names if name != EQUAL) or 1.0
    likelihood, scores = {}, {}
    for name in names:
        share = (sum(map(any, said[name])) + 0.5) / (len(counted) + 1)
        likelihood[name] = _beta_binomial(there, len(counted), WORTH * share, WORTH * (1 - share))
        prior = (1 - EQUAL_PRIOR - NONE_PRIOR) * weights.get(name, 1.0) / total
        scores[name] = likelihood[name] + np.log(EQUAL_PRIOR if name == EQUAL else prior)
    scores[NONE] = _beta_binomial(there, len(counted), 1.0, 1.0) + np.log(NONE_PRIOR)
    mistakes = sorted((x for x in names if x != EQUAL), key=lambda name: (-scores[name], name))
    if not mistakes:
        return None
    least = max(likelihood[name] for name in mistakes) + np.log(LEAST_LIKELIHOOD)
    named = [name for name in mistakes if likelihood[name] >= least]
    posterior = float(np.exp(logsumexp([scores[x] for x in named]) - logsumexp([*scores.values()])))
    if posterior < LEAST_LITTLE_POSTERIOR:
        return None
    return Explanation(named[0], tuple(named[1:]), posterior, agreement, unseen, little=True)


def _beta_binomial(found: int, of: int, a: float, b: float) -> float:
    """The logarithm of the probability of so many of so many, without the binomial coefficient."""
    return float(betaln(a + found, b + of - found) - betaln(a, b))
