"""Tails and powers of the tests of an audit that scipy does not have."""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from scipy.optimize import brentq
from scipy.special import chndtrinc
from scipy.stats import chi2

# Below this variance a sum of rare events is not normal; then Freedman's inequality bounds it.
NORMAL_VARIANCE = 100.0
MOST_SIGNS = 16  # differences of which all signs are tried


def normal_tail(z: float) -> float:
    """P(|Z| ≥ |z|) of a standard normal Z."""
    return math.erfc(abs(z) / math.sqrt(2))


def martingale_tail(excess: float, variance: float) -> float:
    """A bound of P(|S| ≥ |excess|) for a sum S of martingale differences of at most 1 whose
    conditional variances add up to `variance`: normal where that is large, and else Freedman's
    inequality in Bennett's form (Ann. Probab. 3, 1975, theorem 4.1), which always holds."""
    if variance >= NORMAL_VARIANCE:
        return normal_tail(excess / math.sqrt(variance))
    if variance <= 0:
        # Nothing was left to chance. Sums are rounded.
        return 1.0 if abs(excess) < 1e-6 else 0.0
    ratio = abs(excess) / variance
    return min(1.0, 2 * math.exp(-variance * ((1 + ratio) * math.log1p(ratio) - ratio)))


def smallest_excess(variance: float, level: float, power: float) -> float:
    """The smallest excess that `martingale_tail` finds at this level, with this power if chance has
    that variance."""
    spread = math.sqrt(variance)
    least = brentq(lambda x: martingale_tail(x, variance) - level, 0.0, 10.0 + 100.0 * spread)
    return float(least) + NormalDist().inv_cdf(power) * spread


def sign_tail(differences: Sequence[float]) -> float:
    """A bound of P(Σ ±d ≥ Σ d) with random signs: exact for few differences, else Hoeffding's."""
    found = np.array([x for x in differences if x], dtype=np.float64)
    total = float(found.sum())
    if total <= 0:
        return 1.0
    if len(found) <= MOST_SIGNS:
        sums = np.zeros(1)
        for x in found:
            sums = np.concatenate([sums + x, sums - x])
        return float((sums >= total * (1 - 1e-12)).mean())
    return math.exp(-(total**2) / (2 * float((found**2).sum())))


def smallest_variation(count: int, bins: int, level: float, power: float) -> float:
    """The smallest total variation δ between the law of a bin and the uniform one that χ² over
    `bins` equal bins finds with this power in `count` independent draws, at this level.

    Their noncentrality is n·Σ(q_i − 1/B)²·B ≥ 4nδ², by Cauchy and Schwarz, whatever the form of the
    error. So δ = √(λ / 4n), where λ is the noncentrality at which χ² with B − 1 degrees of freedom
    exceeds its limit with this power.
    """
    away = chndtrinc(chi2.isf(level, bins - 1), bins - 1, 1 - power)
    return min(1.0, math.sqrt(away / (4 * count)))


def smallest_shift(count: int, variance: float, level: float, power: float) -> float:
    """The smallest change of the mean of `count` figures with this variance of their sum that the
    two-sided normal test finds with this power."""
    normal = NormalDist()
    away = normal.inv_cdf(1 - level / 2) + normal.inv_cdf(power)
    return away * math.sqrt(variance) / count
