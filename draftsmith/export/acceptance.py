"""Is a drafter's acceptance in an engine that of our own loop? One rule for exports and audits."""

import math
from dataclasses import dataclass
from statistics import NormalDist

from train.engines.counters import DraftCounts

# Larger than noise: with 2,000 drafted tokens the standard error of a share is at most 0.011.
TOLERANCE, TOLERANCE_TOKENS = 0.03, 2000
# With fewer drafted tokens, one text's end moves the share by more than an error would.
FEWEST_TOKENS = 200


def interval(accepted: int, of: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share of so many tokens, at least one."""
    from scipy.stats import binomtest  # takes a second

    found = binomtest(accepted, of).proportion_ci(0.95, method="wilson")
    return float(found.low), float(found.high)


@dataclass(frozen=True)
class Acceptance:
    """theirs, ours: drafted and accepted tokens of the engine, and of our loop on the same prompts.
    gamma: tokens of a draft, which are accepted or rejected together. level: the probability that
    chance alone makes them differ. parting: the share of the texts that chance may make different
    ones: 1 if they are drawn, 0 if all are the same in both."""

    theirs: DraftCounts
    ours: DraftCounts
    gamma: int
    level: float
    parting: float

    @property
    def fewest(self) -> float:
        """Drafted tokens, of the loop that has fewer."""
        return min(self.theirs.drafted, self.ours.drafted)

    @property
    def allowed(self) -> float:
        """The largest difference of the shares that is no error."""
        both = self.theirs + self.ours
        rate = both.rate or 0.0
        of_each = sum(1 / max(counts.drafted, 1) for counts in (self.theirs, self.ours))
        chance = math.sqrt(rate * (1 - rate) * self.gamma * of_each * self.parting)
        fixed = TOLERANCE * math.sqrt(max(1.0, TOLERANCE_TOKENS / max(self.fewest, 1)))
        return fixed + NormalDist().inv_cdf(1 - self.level / 2) * chance

    @property
    def fault(self) -> str | None:
        """What is wrong, without the engine's name; None: the shares agree."""
        theirs, ours = self.theirs.rate or 0.0, self.ours.rate or 0.0
        if abs(theirs - ours) <= self.allowed:
            return None
        return (
            f"draft efficiency is {theirs:.3f} there and {ours:.3f} in our loop; they may differ "
            f"by {self.allowed:.3g}"
        )
