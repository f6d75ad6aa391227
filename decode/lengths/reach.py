"""A draft ends where the drafter's own estimates say that the target rarely gets."""

import torch
from torch import Tensor

from decode.lengths import POLICIES
from decode.lengths.watcher import Watcher, require_threshold


@POLICIES.register("reach")
class Reach(Watcher):
    """Stops before a token if the target accepts it, and all before it, with an estimated
    probability below `threshold`: Π c_i < threshold, the product up to this token.

    c_i is the estimate of the drafter's confidence head (DSpark, 2607.05147). It depends on the
    tokens before i, never on token i. In the paper the load of the server sets the length; here the
    threshold does. min_depth: this many tokens are always drafted.
    """

    signal = "reach"
    reads_estimates = True

    def __init__(self, max_depth: int = 8, threshold: float = 0.3, min_depth: int = 1) -> None:
        super().__init__(max_depth, min_depth)
        require_threshold(threshold)
        self.threshold = threshold

    def measure(self, logits: Tensor, estimate: Tensor | None) -> Tensor:
        assert estimate is not None
        return estimate

    def ends(self, position: int, value: Tensor) -> Tensor:
        # What `stops` has kept of this draft, this token included.
        product = torch.stack(self._seen[: position + 1], 1).prod(1)
        return product < self.threshold
