"""The drafter is right after the target's states, and wrong after its own."""

import numpy as np

from draftsmith.diagnosis.causes import CAUSES, Cause, Measurement, surely_falls
from draftsmith.diagnosis.evidence import Evidence
from heads.eagle_drafter import AutoregressiveDrafter


@CAUSES.register("exposure")
class Exposure(Cause):
    says = "the drafter is right where it reads the target's states, and less after its own"
    remedy = "train with as many steps (EAGLE-3: steps; EAGLE-1, MTP: depth) as a draft has tokens"

    def measure(self, evidence: Evidence) -> Measurement:
        """Both figures are of the same tokens: each is drafted as the first one, after the target's
        state, and as the second one, after a first one that is right."""
        if not isinstance(evidence.drafter, AutoregressiveDrafter) or evidence.gamma < 2:
            return Measurement(False, "no token is drafted from a state of the drafter's own")
        _, rights = evidence.answers
        among = (rights.counts & rights.right[..., 0])[:, :-1] & rights.counts[:, 1:]
        some = among.any(1)
        first, second = rights.right[:, 1:, 0], rights.right[:, :-1, 1]
        shares = [(x & among)[some].sum(1) / among[some].sum(1) for x in (first, second)]
        if not some.any():
            return Measurement(None, "no first draft token is right")
        forced, own = (np.asarray(x) for x in shares)
        return Measurement(
            surely_falls(forced, own),
            f"{forced.mean():.1%} of the tokens are right as the first of a draft, and "
            f"{own.mean():.1%} of the same as the second, after a right one",
        )
