"""How acceptance grows with the data, extrapolated from a few small trainings.

A drafter that was trained on a share x of the data refuses r(x) of the tokens that it is judged on
at a place: a power law with a floor, r(x) = r₁ · (φ + (1 − φ) · (x / x₁)^−β), where r₁ is that of
the largest training so far, at x₁ (such laws of losses: 2001.08361). All places share β and φ, so
places that few drafts reach are told by the others.

Shapes: P trainings, D places, N draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 4000
# β. Heads learn nothing at first and then fast: where 48 rows became 1,400, it came out above 0.3.
EXPONENTS = np.geomspace(0.05, 2.0, 24)
FLOORS = np.linspace(0.0, 1.0, 21)  # φ
REFUSED = np.linspace(0.0025, 0.9975, 200)  # r₁
# How likely it is before that more data changes nothing more (φ = 1): some drafters cannot learn
# more, and one training does not say so.
NO_MORE = 0.2


@dataclass(frozen=True)
class Point:
    """What was measured of one training.

    share: of the data that it had. reached, accepted: counts by place, [D]. spread: how many times
    larger the variance of tokens per step is than with independent tokens, at least 1: the tokens
    of one text have much in common.
    """

    share: float
    reached: np.ndarray
    accepted: np.ndarray
    spread: float = 1.0


def acceptance_at(share: float, points: Sequence[Point], seed: int = 0) -> np.ndarray:
    """Draws of the acceptance by place of a training on this share of the data, float64 [N, D],
    given what was measured. Before, φ was 1 with the probability NO_MORE, and all other values of
    φ, of log β and of r₁ were equally likely.

    >>> half = Point(0.5, np.array([1000.0]), np.array([600.0]))
    >>> full = Point(1.0, np.array([1000.0]), np.array([700.0]))
    >>> bool(abs(acceptance_at(1.0, [half, full]).mean() - 0.7) < 0.03)
    True
    """
    shares = np.array([point.share for point in points])
    reached, accepted = (
        np.stack([getattr(point, name) / point.spread for point in points])
        for name in ("reached", "accepted")
    )
    exponents, floors = (x.ravel() for x in np.meshgrid(EXPONENTS, FLOORS, indexing="ij"))

    def growth(x: np.ndarray) -> np.ndarray:
        """r(x) / r₁, [β and φ, x]."""
        return floors[:, None] + (1 - floors[:, None]) * (x / shares.max()) ** -exponents[:, None]

    # [β and φ, P, r₁]; a refused share cannot be above 1.
    refused = np.clip(growth(shares)[:, :, None] * REFUSED, 1e-6, 1 - 1e-6)
    likelihood = np.einsum("pd,sprd->sdr", accepted, np.log1p(-refused)[..., None])
    likelihood += np.einsum("pd,sprd->sdr", reached - accepted, np.log(refused)[..., None])
    highest = likelihood.max(2, keepdims=True)
    of_refused = np.exp(likelihood - highest)  # [β and φ, D, r₁]
    of_shape = (highest[:, :, 0] + np.log(of_refused.sum(2))).sum(1)
    level = floors == 1.0
    of_shape += np.log(np.where(level, NO_MORE / level.sum(), (1 - NO_MORE) / (~level).sum()))
    rng = np.random.default_rng(seed)
    weights = np.exp(of_shape - of_shape.max())
    shapes = rng.choice(len(weights), DRAWS, p=weights / weights.sum())
    ladders = of_refused.cumsum(2) / of_refused.sum(2, keepdims=True)
    heights = rng.random((DRAWS, reached.shape[1], 1))
    drawn = REFUSED[np.minimum((ladders[shapes] < heights).sum(2), len(REFUSED) - 1)]
    return 1 - np.minimum(drawn * growth(np.array([share]))[shapes], 1.0)


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
