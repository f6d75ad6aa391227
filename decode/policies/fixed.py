"""The same draft length always."""

import numpy as np

from decode.policies import POLICIES, Policy


@POLICIES.register("fixed")
class Fixed(Policy):
    """Every draft is `most` deep: what acceptance rates are compared at."""

    constant = True

    def depths(self) -> np.ndarray:
        return np.full(self.rows, self.most)
