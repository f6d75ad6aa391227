"""The draft length is always the same."""

import numpy as np

from decode.policies import POLICIES, Policy


@POLICIES.register("fixed")
class Fixed(Policy):
    """Every draft is `most` deep. Acceptance rates are compared with this policy."""

    constant = True

    def depths(self) -> np.ndarray:
        return np.full(self.rows, self.most)
