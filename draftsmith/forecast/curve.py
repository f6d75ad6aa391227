"""How acceptance grows with the data, extrapolated from a few small trainings.

A drafter learns little at first, then fast, then little more. After a training on n rows it accepts
at a place a(n) = A · σ(v + p · log(n / n₁)), where σ(z) = 1 / (1 + e⁻ᶻ) and n₁ are the rows of its
largest training so far. A is the most that it can learn there, v how far it is, p how fast it goes
on. All places of a drafter share p.

All drafters of a run learn the same text of the same target. So logit A of every place of each is
near one value, apart from what is usual for its kind, and so is v: what one kind has learnt tells
how much the others can learn. What is usual for a kind, `LEARNERS`, is of earlier trainings.

Shapes: D places, N draws; a, p, v: values of A, of p, of v; c, s: of what logit A has in common,
and of what v has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 4000
LOGITS = np.linspace(-3.5, 4.0, 31)  # of A
CEILINGS = 1 / (1 + np.exp(-LOGITS))  # A
RATES = np.append(0.0, np.geomspace(0.2, 3.0, 10))  # p
LEARNT = np.linspace(-8.0, 7.0, 101)  # v
# What is known before is normal, (mean, standard deviation): what logit A has in common, and v
# after a training on ROWS rows; and how far logit A, v and log p of one drafter are from there.
COMMON_CEILINGS, COMMON_CEILING = np.linspace(-2.75, 3.25, 16), (0.2, 1.0)
COMMON_STARTS, COMMON_START = np.linspace(-2.5, 2.5, 9), (0.0, 1.0)
ROWS = 48
OF_CEILING, OF_START, OF_RATE = 0.25, 1.0, 0.35
# How likely it is before that a drafter learns no more (p = 0): some cannot.
NO_MORE = 0.1
# No drafter learns just so: each of several trainings tells no more than so many tokens of a place.
MOST_TOLD = 80.0


@dataclass(frozen=True)
class Learner:
    """What is usual for a kind of drafters: p, what logit A has more than is common, and v after
    ROWS rows. The last two are of the first place and of those after it."""

    rate: float
    ceiling: tuple[float, float]
    start: tuple[float, float]


# Fitted to trainings of two targets, which docs/results/forecast.md lists. What begins with layers
# of the target learns at once, heads late and then faster.
HEADS = (-2.27, -2.95)
LEARNERS = {
    "small_lm": Learner(0.81, (0.0, 0.48), (0.28, -0.40)),
    "medusa": Learner(1.99, (-0.71, -0.27), HEADS),
    "eagle1": Learner(1.99, (-0.12, -1.18), HEADS),
    "eagle3": Learner(1.99, (-0.26, 0.37), HEADS),
    "dflash": Learner(1.99, (-0.37, 0.0), HEADS),
}
UNKNOWN = Learner(1.99, (-0.36, -0.27), HEADS)  # a kind that was in none of them


@dataclass(frozen=True)
class Point:
    """What was measured of one training.

    rows: that it had. reached, accepted: counts by place, [D]. spread: how many times larger the
    variance of tokens per step is than with independent tokens, at least 1: the tokens of one text
    have much in common.
    """

    rows: int
    reached: np.ndarray
    accepted: np.ndarray
    spread: float = 1.0

    def again(self) -> np.ndarray:
        """Draws of the acceptance by place of the same drafter on other texts, float64 [N, D]."""
        accepted, refused = self.accepted, self.reached - self.accepted
        rng = np.random.default_rng(0)
        size = (DRAWS, len(self.reached))
        return rng.beta(1 + accepted / self.spread, 1 + refused / self.spread, size)


def acceptance_at(
    rows: Sequence[int], measured: Mapping[str, tuple[str, Sequence[Point]]]
) -> dict[str, np.ndarray]:
    """Draws of the acceptance by place after trainings on so many rows, by drafter, float64
    [len(rows), N, D]. Each draw is one curve, at all of these rows.

    measured: the kind of each drafter, and its trainings.

    >>> few, many = (Point(n, np.array([900]), np.array([9 * n])) for n in (48, 60))
    >>> found = acceptance_at([60, 600], {"heads": ("medusa", [few, many])})["heads"].mean(1)
    >>> found.shape, bool(abs(found[0, 0] - 0.6) < 0.1), bool(found[1, 0] > 0.65)
    ((2, 1), True, True)
    """
    rng = np.random.default_rng(0)
    curves = {
        name: _Curves(LEARNERS.get(kind, UNKNOWN), points)
        for name, (kind, points) in measured.items()
    }
    common = np.log(
        np.outer(
            _normal(COMMON_CEILINGS, *COMMON_CEILING),
            _normal(COMMON_STARTS, *COMMON_START),
        )
    )
    common += sum(np.logaddexp.reduce(of.rates, axis=2) for of in curves.values())
    weights = np.exp(common - common.max())
    drawn = rng.choice(weights.size, DRAWS, p=weights.ravel() / weights.sum())
    c, s = np.unravel_index(drawn, common.shape)
    return {name: of.draw(rows, c, s, rng) for name, of in curves.items()}


class _Curves:
    """Those of one drafter. likelihood: of what was measured, up to a factor, [D, a, p, v].
    ceilings, starts: how likely A and v are, given what is common, [D, c, a], [D, s, p, v]. told:
    the likelihood whatever v is, [D, s, p, a]. rates: log of how likely p and what was measured
    are, up to a summand, [c, s, p]."""

    def __init__(self, learner: Learner, points: Sequence[Point]) -> None:
        self.rows = max(point.rows for point in points)
        log = np.zeros((1, len(CEILINGS), len(RATES), len(LEARNT)))
        for point in points:
            grown = LEARNT + RATES[:, None] * np.log(point.rows / self.rows)
            rate = np.clip(np.multiply.outer(CEILINGS, 1 / (1 + np.exp(-grown))), 1e-6, 1 - 1e-6)
            spread = point.spread
            if len(points) > 1:
                spread = max(spread, point.reached.max() / MOST_TOLD)
            accepted, reached = point.accepted / spread, point.reached / spread
            log = log + np.multiply.outer(accepted, np.log(rate))
            log += np.multiply.outer(reached - accepted, np.log1p(-rate))
        self.likelihood = np.exp(log - log.max((1, 2, 3), keepdims=True))
        later = [min(place, 1) for place in range(len(self.likelihood))]
        ceilings = np.add.outer(np.array(learner.ceiling)[later], COMMON_CEILINGS)
        starts = np.add.outer(np.array(learner.start)[later], COMMON_STARTS)
        starts = np.add.outer(starts, RATES * np.log(self.rows / ROWS))
        self.ceilings = _normal(LOGITS, ceilings[..., None], OF_CEILING)
        self.starts = _normal(LEARNT, starts[..., None], OF_START)
        self.told = np.einsum("dapv,dspv->dspa", self.likelihood, self.starts)
        rates = (1 - NO_MORE) * _normal(np.log(RATES[1:]), np.log(learner.rate), OF_RATE)
        likely = np.einsum("dca,dspa->dcsp", self.ceilings, self.told) + 1e-300
        self.rates = np.log(np.append(NO_MORE, rates)) + np.log(likely).sum(0)

    def draw(
        self, rows: Sequence[int], c: np.ndarray, s: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """[rows, N, D], for draws of what is common, [N]."""
        p = _pick(np.exp(self.rates - self.rates.max(2, keepdims=True))[c, s], rng)
        grown = RATES[p] * np.log(np.array(rows) / self.rows)[:, None]
        places = []
        for likelihood, ceilings, starts, told in zip(
            self.likelihood, self.ceilings, self.starts, self.told, strict=True
        ):
            a = _pick(ceilings[c] * told[s, p], rng)
            v = _pick(likelihood[a, p] * starts[s, p], rng)
            places.append(CEILINGS[a] / (1 + np.exp(-LEARNT[v] - grown)))
        return np.stack(places, 2)


def _normal(x: np.ndarray, mean: np.ndarray | float, deviation: float) -> np.ndarray:
    """How likely each x is, [..., x]."""
    weights = np.exp(-(((x - mean) / deviation) ** 2) / 2) + 1e-300
    return weights / weights.sum(-1, keepdims=True)


def _pick(weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A place of each row, as likely as its weight, [N]."""
    ladders = weights.cumsum(1)
    return (ladders < rng.random((len(weights), 1)) * ladders[:, -1:]).sum(1)


def tokens_per_step(acceptance: np.ndarray) -> np.ndarray:
    """[...]: tokens per step, the target's own included, for acceptance by place, [..., D], of the
    drafts that got so far.

    >>> float(tokens_per_step(np.array([0.5, 0.5])))
    1.75
    """
    return 1 + acceptance.cumprod(-1).sum(-1)


def spread_of(reached: np.ndarray, accepted: np.ndarray, steps: int, error: float) -> float:
    """`Point.spread`. error: the standard error of tokens per step over texts."""
    rate = accepted / np.maximum(reached, 1)
    through = np.concatenate([[1.0], rate.cumprod()])
    # The number of accepted tokens of one step is its depth: E[X²] = Σ (2k − 1) · P(X ≥ k).
    mean = through[1:].sum()
    square = ((2 * np.arange(1, len(through)) - 1) * through[1:]).sum()
    independent = max(square - mean**2, 1e-9) / max(steps, 1)
    return max(error**2 / independent, 1.0)
