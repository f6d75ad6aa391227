"""A draft ends when the drafter is no longer confident."""

from torch import Tensor

from decode.errors import UserError
from decode.policies import POLICIES, Watcher


@POLICIES.register("confidence")
class Confidence(Watcher):
    """Stops before a token if the largest probability of its distribution is below `threshold`.

    The distribution is the drafter's at temperature 1, whatever temperature the text is drawn with.
    So a threshold means the same for greedy and for drawn drafts. The policy uses the largest
    probability, never the probability of the drawn token: dropping a token because of its own
    probability would change the distribution of the text. least: this many tokens are always
    drafted. The pass that computes the first token's logits is already paid.
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
