"""A ratio of totals over prompts, with a 95% interval.

The interval is a studentised bootstrap of the logarithm of the ratio. The logarithm's standard
error is that of its linear part. Prompts are drawn again with replacement, and each draw says how
many of its own standard errors it is away from the measured ratio. 95% of the draws are nearer than
some number of them. The interval ends that many standard errors below and above the measured ratio.
For few prompts with skewed figures this number is larger than the normal distribution's 1.96. It is
at least Student's and at most twice that.

A percentile bootstrap, which takes the draws' own quantiles, covers the true ratio in 85 to 90% of
the cases with 8 prompts. A test measures how often both cover it. No interval knows of prompts that
were not drawn: if one prompt in ten ends in a loop, which makes its drafts easy, 8 prompts may hold
none, and the interval then covers the true ratio in about 84% of the cases.
"""

from functools import lru_cache

import numpy as np
from scipy.special import stdtrit

# With fewer prompts there is no interval: they say too little about how prompts differ.
FEWEST_PROMPTS = 6
DRAWS = 1000
# The share of a ratio's standard error from rounding alone. Below it, the prompts do not differ.
ROUNDING = 1e-9
# Of the numerator, the divisor of the denominator, the denominator, the numerator's divisor.
SIGNS = np.array([1.0, 1.0, -1.0, -1.0])


def ratio_of_totals(
    numerator: np.ndarray,
    denominator: np.ndarray,
    *,
    per: tuple[np.ndarray, np.ndarray] | None = None,
) -> dict[str, float] | None:
    """{value, low, high}: Σ numerator / Σ denominator over prompts (or batches), with the ends of
    its 95% interval. None for empty arrays, or if a divisor is 0 in total.

    Without `low` and `high` for fewer than FEWEST_PROMPTS, and for a value of 0.

    per: units for both, such as tokens. The value is then (Σ numerator / Σ per[0]) / (Σ denominator
    / Σ per[1]).
    """
    count = len(numerator)
    over, under = per or (np.ones(count), np.ones(count))
    if not count or not (denominator.sum() and over.sum() and under.sum()):
        return None
    figures = np.stack([numerator, under, denominator, over], 1).astype(np.float64)
    total, divisor = numerator.sum() * under.sum(), denominator.sum() * over.sum()
    found = {"value": float(total / divisor)}
    if total and count >= FEWEST_PROMPTS:
        factor = float(np.exp(_half_width(figures)))
        found |= {"low": found["value"] / factor, "high": found["value"] * factor}
    return found


def product_of_ratios(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    """Two measured ratios multiplied. The ends of the interval are products too, which is wide
    enough however the two depend on each other.

    >>> product({"value": 2.0, "low": 1.0, "high": 4.0}, {"value": 3.0, "low": 2.0, "high": 4.0})
    {'value': 6.0, 'low': 2.0, 'high': 16.0}
    """
    return {end: one[end] * other[end] for end in one if end in other}


def _half_width(figures: np.ndarray) -> float:
    """Half the width of the interval of the logarithm. figures: float64 [n, 4], by prompt."""
    count = len(figures)
    products = (figures[:, :, None] * figures[:, None, :]).reshape(count, 16)
    sums = np.concatenate([np.ones((1, count)), _draws(count)]) @ np.hstack([figures, products])
    sums = sums[(sums[:, :4] > 0).all(1)]  # others are no ratio
    # The linear part: each prompt's share of each total, with its sign.
    weights = SIGNS * count / sums[:, :4]
    squares = sums[:, 4:].reshape(-1, 4, 4)
    variance = np.einsum("di,dij,dj->d", weights, squares, weights) / (count * (count - 1))
    errors = np.sqrt(np.maximum(variance, ROUNDING**2))
    if errors[0] <= ROUNDING:
        return 0.0
    logarithms = np.log(sums[:, :4]) @ SIGNS
    away = np.abs(logarithms[1:] - logarithms[0]) / errors[1:]
    student = stdtrit(count - 1, 0.975)
    return float(errors[0] * np.clip(np.quantile(away, 0.95), student, 2 * student))


@lru_cache(maxsize=8)
def _draws(count: int) -> np.ndarray:
    """float64 [DRAWS, count]: how often each prompt is drawn. The same at every call."""
    drawn = np.random.default_rng(0).integers(0, count, (DRAWS, count))
    places = drawn + count * np.arange(DRAWS)[:, None]
    return np.bincount(places.ravel(), minlength=drawn.size).reshape(drawn.shape).astype(np.float64)
