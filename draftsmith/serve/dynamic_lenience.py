"""Dynamic lenience: more draft tokens are accepted while many texts wait. LOSSY while they do."""

import math
import time
from collections.abc import Callable

from decode.base.errors import UserError
from decode.rules import Rule
from decode.rules.lossy_speculative import Lenience
from decode.rules.speculative import SpeculativeSampling

BEGINS = 0.5  # waiting texts per row at which a spike of traffic begins
ENDS = 0.1  # … and at which it ends
FULL = 1.0  # … and from which on l is at its lower bound
SECONDS = 2.0  # a jump of the load is seen to 1 − 1/e after this time


def require_low(low: float) -> None:
    """Raise UserError unless `low` is in (0, 1]."""
    if not 0 < low <= 1:
        raise UserError(
            f"dynamic_lenience is {low}; expected the lower bound of l, a number in (0, 1], "
            "where 1 turns it off"
        )


class DynamicLenience:
    """Lowers the l of the rule `lenience` in spikes of traffic, and raises it back when they end.

    A draft token is accepted with probability min(1, p(x)/(l·q(x))). The load is the number of
    texts that wait, divided by the rows, averaged over SECONDS: from one look to the next it is
    what the first one saw. A spike begins at BEGINS and ends at ENDS, so that l does not flutter.
    In a spike l falls with the load, from `high` without load to `low` at FULL. Otherwise l is
    `high`.

    rule: `speculative`, or `lenience`, whose l is then the upper bound `high`. rows: texts that
    decode together. clock: seconds. Raises UserError for another rule, and unless 0 < low ≤ high.
    """

    def __init__(
        self, rule: Rule, low: float, rows: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        require_low(low)
        if type(rule) is SpeculativeSampling:
            rule = Lenience(1.0)
        if not isinstance(rule, Lenience):
            raise UserError(
                f"dynamic lenience changes the rules speculative and lenience, but the rule is "
                f"{type(rule).__name__}; set rule to one of these, with a drafter of chains, or "
                "dynamic_lenience to 1"
            )
        if low > rule.lenience:
            raise UserError(
                f"dynamic_lenience is {low}, above the rule's lenience of {rule.lenience}; "
                "expected a lower bound"
            )
        self.rule, self.low, self.high, self.rows = rule, low, rule.lenience, rows
        self._clock, self._at = clock, clock()
        self._waiting, self.load, self.spike = 0, 0.0, False

    def __call__(self, waiting: int) -> None:
        """Set the rule's l. waiting: texts that wait for a row, after the free rows are given."""
        now = self._clock()
        kept = math.exp((self._at - now) / SECONDS)
        self._at = now
        self.load = kept * self.load + (1 - kept) * self._waiting / self.rows
        self._waiting = waiting
        self.spike = self.load > ENDS if self.spike else self.load >= BEGINS
        fall = min(self.load / FULL, 1.0) if self.spike else 0.0
        self.rule.lenience = self.high - (self.high - self.low) * fall
