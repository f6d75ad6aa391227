"""A draft ends after a token that is not likely, with a threshold that follows acceptance."""

import numpy as np

from decode.base.errors import require_fits
from decode.lengths import POLICIES
from decode.lengths.confidence import ConfidenceWatcher
from decode.verification import Verification

# The paper's values: weights of the past in the two averages, and the step of the threshold.
PAST_RATES, PAST_THRESHOLDS, STEP = 0.5, 0.9, 0.01


@POLICIES.register("draft_exit")
class DraftExit(ConfidenceWatcher):
    """Ends a draft after a token whose distribution has a largest probability below θ. That token
    is still drafted, so no pass of the drafter is lost. Draft & Verify (2309.08168), section 3.3.

    Each row has a θ. After each draft, the running acceptance rate r ← 0.5·r + 0.5·accepted/drafted
    is compared with `goal`. Below it, θ rises by 0.1 · 0.01. At or above it, θ falls by as much,
    except after a draft of full length, which θ did not end. threshold: θ at the start of a text.
    The paper starts at 0.8 for greedy text and 0.5 for sampled text.

    Differs from the paper: it compares θ with the probability of the drafted token. For a greedy
    draft that is the same. If tokens are drawn, the largest probability is known before the draw.
    Probabilities are at temperature 1, and θ stays between 0 and 1.
    """

    stops_after = True
    thresholds: np.ndarray  # [B]
    _rates: np.ndarray  # [B]

    def __init__(
        self, max_depth: int = 8, threshold: float = 0.8, goal: float = 0.9, min_depth: int = 1
    ) -> None:
        super().__init__(max_depth, min_depth)
        require_fits(lambda x: 0 <= x <= 1, "a number from 0 to 1", threshold=threshold, goal=goal)
        self.threshold, self.goal = threshold, goal
        self.per_row = {"thresholds": threshold, "_rates": 0.0}

    def learn(self, verification: Verification, values: np.ndarray, watched: np.ndarray) -> None:
        # Rows that another drafter served are not watched.
        learns = (verification.drafted > 0) & (watched > 0)
        rates = PAST_RATES * self._rates + (1 - PAST_RATES) * verification.accepted_share()
        self._rates = np.where(learns, rates, self._rates)
        complete = verification.drafted >= self.max_depth
        change = np.where(self._rates < self.goal, STEP, np.where(complete, 0.0, -STEP))
        moved = np.clip(self.thresholds + (1 - PAST_THRESHOLDS) * change, 0.0, 1.0)
        self.thresholds = np.where(learns, moved, self.thresholds)
