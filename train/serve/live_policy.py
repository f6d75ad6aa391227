"""A draft-length policy that can be exchanged while rows are decoding."""

import numpy as np
from torch import Tensor

from decode.errors import UserError
from decode.policies import Policy
from decode.verification import Verification


class LivePolicy(Policy):
    """Does what another policy does. `use` exchanges that one between two passes.

    max_depth: of any policy that it may get. The loop reserves memory for drafts of this depth.
    policy: the one in use.
    """

    def __init__(self, policy: Policy, max_depth: int) -> None:
        super().__init__(max_depth)
        self.use(policy)

    def require_fits(self, policy: Policy) -> None:
        """Raise UserError if a policy drafts deeper than this one may."""
        if policy.max_depth > self.max_depth:
            raise UserError(
                f"drafts would be {policy.max_depth} tokens deep, and this service has memory for "
                f"{self.max_depth}; choose a smaller gamma, or start the service with a larger one"
            )

    def use(self, policy: Policy) -> None:
        """Use another policy from the next draft on. The running rows begin it anew, like new rows.
        Raises as `require_fits`."""
        self.require_fits(policy)
        policy.start(self.rows)
        self.policy = policy
        self.watches, self.constant = policy.watches, policy.constant
        self.needs_costs, self.reads_times = policy.needs_costs, policy.reads_times
        self.watched = policy.watched

    def start(self, rows: int) -> None:
        super().start(rows)
        self.policy.start(rows)

    def depths(self) -> np.ndarray:
        return self.policy.depths()

    def stops(self, position: int, logits: Tensor, drafting: Tensor) -> Tensor:
        ended = self.policy.stops(position, logits, drafting)
        self.watched = self.policy.watched
        return ended

    def observe(self, verification: Verification) -> None:
        self.policy.observe(verification)
        self.watched = self.policy.watched

    def keep_rows(self, rows: np.ndarray) -> None:
        super().keep_rows(rows)
        self.policy.keep_rows(rows)

    def add_rows(self, count: int) -> None:
        super().add_rows(count)
        self.policy.add_rows(count)
