"""The length by how many rows are decoded together, as serving engines have it."""

import numpy as np

from decode.errors import UserError
from decode.policies import POLICIES, Policy


@POLICIES.register("by_batch")
class ByBatch(Policy):
    """table: from so many rows on, drafts are so deep; 0 is plain decoding. The fuller the batch,
    the less idle compute there is for verifying.

    Decides for the batch together, so under rules that draw, other than `exact`, a text may differ
    with the rows beside it; its distribution does not.

    >>> policy = ByBatch({1: 8, 4: 4, 16: 0})
    >>> policy.start(5)
    >>> policy.depths().tolist()
    [4, 4, 4, 4, 4]
    """

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
