"""A draft ends when the drafter is no longer confident."""

import numpy as np
from torch import Tensor

from decode.base.device import to_device
from decode.base.errors import require_fits
from decode.lengths import POLICIES
from decode.lengths.watcher import Watcher, require_threshold
from decode.tree_nodes import largest
from decode.verification import Verification


class ConfidenceWatcher(Watcher):
    """Looks at the largest probability of the drafter's distribution at temperature 1. thresholds:
    float64 [B], a draft ends at a smaller one; of the classes with a threshold for each row."""

    signal = "confidence"
    thresholds: np.ndarray

    def measure(self, logits: Tensor, estimate: Tensor | None) -> Tensor:
        return largest(logits)

    def ends(self, position: int, value: Tensor) -> Tensor:
        return value < to_device(self.thresholds, value.device).to(value.dtype)


@POLICIES.register("confidence")
class Confidence(ConfidenceWatcher):
    """Stops before a token if the largest probability of its distribution is below `threshold`.

    The distribution is the drafter's at temperature 1, for any temperature of the text. So a
    threshold means the same for greedy and for drawn drafts. The policy uses the largest
    probability, never the probability of the drawn token: dropping a token because of its own
    probability would change the distribution of the text. min_depth: this many tokens are always
    drafted. The pass that computes the first token's logits is already paid.
    """

    def __init__(self, max_depth: int = 8, threshold: float = 0.4, min_depth: int = 1) -> None:
        super().__init__(max_depth, min_depth)
        require_threshold(threshold)
        self.threshold = threshold

    def ends(self, position: int, value: Tensor) -> Tensor:
        return value < self.threshold


@POLICIES.register("adaptive_confidence")
class AdaptiveConfidence(ConfidenceWatcher):
    """As `confidence`, with a threshold θ for each row, learnt from its last `window` pairs
    (confidence, accepted) of tokens that were judged.

    Criterion: drafting one more token costs `price` plain steps and saves one step if the token is
    accepted. So θ maximises Σ (accepted − price) over the pairs with a confidence of at least θ. If
    several values of θ are equally good, the lowest one is used, at the middle between two
    neighbouring confidences. In `transformers`, a missed token weighs three times a wasted one,
    which is price 0.25.

    The first token of a draft is always drafted. It keeps θ correct: without it, the policy would
    learn nothing about confidences below θ. threshold: θ before there are 8 pairs.
    """

    WARM = 8  # with fewer pairs, `threshold` is used
    thresholds: np.ndarray  # [B]
    _confidence: np.ndarray  # [B, window]
    _gain: np.ndarray  # [B, window]

    def __init__(
        self,
        max_depth: int = 8,
        threshold: float = 0.4,
        window: int = 128,
        price: float = 0.25,
        min_depth: int = 1,
    ) -> None:
        super().__init__(max_depth, min_depth)
        require_threshold(threshold)
        require_fits(lambda x: x >= self.WARM, f"at least {self.WARM} pairs", window=window)
        require_fits(lambda x: 0 < x < 1, "plain steps, above 0 and below 1", price=price)
        self.threshold, self.window, self.price = threshold, window, price
        # The latest pairs of a row, oldest first; empty positions have confidence NaN.
        self.per_row = {
            "thresholds": threshold,
            "_confidence": np.full(window, np.nan),
            "_gain": np.zeros(window),
        }

    def learn(self, verification: Verification, values: np.ndarray, watched: np.ndarray) -> None:
        judged = np.minimum(np.minimum(verification.reached, watched), verification.drafted)
        for position in range(int(judged.max(initial=0))):
            row = np.flatnonzero(judged > position)
            for past, new in (
                (self._confidence, values[row, position]),
                (self._gain, (verification.accepted[row] > position) - self.price),
            ):
                past[row, :-1] = past[row, 1:]
                past[row, -1] = new
        changed = np.flatnonzero(judged > 0)
        if len(changed):
            self.thresholds[changed] = self._best(changed)

    def _best(self, rows: np.ndarray) -> np.ndarray:
        """float64 [rows]: the θ that the criterion selects, or `threshold` with too few pairs."""
        order = np.argsort(-self._confidence[rows], axis=1, kind="stable")  # NaN comes last
        confidence = np.take_along_axis(self._confidence[rows], order, 1)
        known = ~np.isnan(confidence)
        gain = np.where(known, np.take_along_axis(self._gain[rows], order, 1), 0.0).cumsum(1)
        following = np.pad(confidence[:, 1:], ((0, 0), (0, 1)), constant_values=np.nan)
        # θ may lie only between two different confidences, or below the lowest.
        cut = known & ~(following == confidence)
        worth = np.where(cut, gain, -np.inf)
        # Searched from low θ to high, so the lowest of equally good values is found first.
        at = worth.shape[1] - 1 - worth[:, ::-1].argmax(1)
        row = np.arange(len(rows))
        low = following[row, at]
        middle = (confidence[row, at] + np.where(np.isnan(low), 0.0, low)) / 2
        # If nothing pays, θ is the next float32 above the highest confidence, so only the first
        # token is drafted.
        above = np.nextafter(confidence[:, 0].astype(np.float32), np.float32(2))
        middle = np.where(worth[row, at] > 0, middle, above)
        return np.where(known.sum(1) < self.WARM, self.threshold, middle)
