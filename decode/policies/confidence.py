"""A draft ends where the drafter is no longer sure."""

from torch import Tensor

from decode.errors import UserError
from decode.policies import POLICIES, Watcher


@POLICIES.register("confidence")
class Confidence(Watcher):
    """Stops before a token whose distribution has no probability of at least `threshold`.

    The distribution is the drafter's at temperature 1, whatever is sampled with, so that a
    threshold means the same for greedy and for drawn drafts. It is the largest probability that
    counts, never that of the token drawn: dropping a token for its own would change what is
    sampled. least: this many tokens are drafted in any case; the pass that computes the first
    token's logits is already paid.
    """

    signal = "confidence"

    def __init__(self, most: int = 8, threshold: float = 0.4, least: int = 1) -> None:
        super().__init__(most, least)
        if not 0 <= threshold <= 1:
            raise UserError(f"threshold is {threshold}; expected a probability, 0 to 1")
        self.threshold = threshold

    def measure(self, logits: Tensor) -> Tensor:
        return largest_probability(logits)

    def ends(self, place: int, value: Tensor) -> Tensor:
        return value < self.threshold


def largest_probability(logits: Tensor) -> Tensor:
    """float32 [B]: the largest probability of the distribution at temperature 1."""
    logits = logits.float()
    return (logits.amax(-1) - logits.logsumexp(-1)).exp()
