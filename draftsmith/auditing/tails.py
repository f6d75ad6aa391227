"""The few distributions that the tests of an audit need, and the arithmetic of their power.

Incomplete gamma functions are torch's, so nothing else has to be installed.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import torch

# Below this variance a sum of rare events is not normal; then Freedman's inequality bounds it.
NORMAL_VARIANCE = 100.0
MOST_SIGNS = 16  # differences of which all signs are tried
_HIGHEST = 1e6  # of a noncentrality that is searched for


def chi_square_tail(statistic: float, freedom: float) -> float:
    """P(χ² ≥ statistic). freedom: the degrees of freedom."""
    half = torch.tensor([freedom / 2, max(statistic, 0.0) / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


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
    low, high = 0.0, 10.0 + 100.0 * math.sqrt(variance)
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        found = martingale_tail(middle, variance) < level
        low, high = (low, middle) if found else (middle, high)
    return high + NormalDist().inv_cdf(power) * math.sqrt(variance)


def binomial_tail(count: int, trials: int, p: float) -> float:
    """P(X ≥ count) of a binomial X."""
    terms = (
        math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(count, trials + 1)
    )
    return min(1.0, math.fsum(terms))


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


def noncentral_tail(statistic: float, freedom: int, noncentrality: float) -> float:
    """P(χ² ≥ statistic) with this noncentrality: a mixture of central ones with Poisson weights."""
    mean = noncentrality / 2
    spread = int(12 * math.sqrt(mean) + 40)
    terms = torch.arange(max(0, int(mean) - spread), int(mean) + spread, dtype=torch.float64)
    log_weights = -mean + terms * math.log(max(mean, 1e-300)) - torch.lgamma(terms + 1)
    half = torch.tensor(statistic / 2, dtype=torch.float64)
    tails = torch.special.gammaincc(freedom / 2 + terms, half)
    return float((log_weights.exp() * tails).sum())


def chi_square_limit(freedom: int, level: float) -> float:
    """The statistic that chance exceeds with this probability."""
    low, high = 0.0, 1e5
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if chi_square_tail(middle, freedom) > level else (low, middle)
    return high


def smallest_variation(count: int, bins: int, level: float, power: float) -> float:
    """The smallest total variation δ between the law of a bin and the uniform one that χ² over
    `bins` equal bins finds with this power in `count` independent draws, at this level.

    Their noncentrality is n·Σ(q_i − 1/B)²·B ≥ 4nδ², by Cauchy and Schwarz, whatever the form of the
    error. So δ = √(λ / 4n), where λ is the noncentrality at which χ² with B − 1 degrees of freedom
    exceeds its limit with this power.
    """
    limit = chi_square_limit(bins - 1, level)
    low, high = 0.0, _HIGHEST
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        found = noncentral_tail(limit, bins - 1, middle) >= power
        low, high = (low, middle) if found else (middle, high)
    return min(1.0, math.sqrt(high / (4 * count)))


def smallest_shift(count: int, variance: float, level: float, power: float) -> float:
    """The smallest change of the mean of `count` figures with this variance of their sum that the
    two-sided normal test finds with this power."""
    normal = NormalDist()
    away = normal.inv_cdf(1 - level / 2) + normal.inv_cdf(power)
    return away * math.sqrt(variance) / count
