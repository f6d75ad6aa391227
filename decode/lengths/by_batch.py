"""The draft length depends on the number of rows in the batch, as in serving engines."""

import numpy as np

from decode.base.errors import UserError
from decode.lengths import POLICIES, Policy


@POLICIES.register("by_batch")
class ByBatch(Policy):
    """table: {minimum number of rows: depth of drafts}; depth 0 is plain decoding. A fuller batch
    leaves less idle compute for verification.

    Decides for the batch as a unit, so under rules that draw, except `exact`, a text may depend on
    the other rows. Its distribution does not.

    >>> policy = ByBatch({1: 8, 4: 4, 16: 0})
    >>> policy.start(5)
    >>> policy.depths().tolist()
    [4, 4, 4, 4, 4]
    """

    by_batch = True

    def __init__(self, table: dict[int, int]) -> None:
        if 1 not in table or min(table) < 1 or min(table.values()) < 0:
            raise UserError(
                f"table is {table}; expected numbers of rows from 1 on with draft lengths ≥ 0, "
                "such as {1: 8, 4: 4, 16: 0}"
            )
        super().__init__(max(table.values()))
        self.table = dict(sorted(table.items()))

    def depths(self) -> np.ndarray:
        reached = [depth for rows, depth in self.table.items() if rows <= max(self.rows, 1)]
        return np.full(self.rows, reached[-1])
