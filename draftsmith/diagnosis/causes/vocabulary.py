"""The draft vocabulary misses tokens of the served texts."""

import numpy as np
from torch import Tensor

from draftsmith.diagnosis.causes import CAUSES, Cause, Measurement, surely_above
from draftsmith.diagnosis.evidence import Evidence


@CAUSES.register("vocabulary")
class Vocabulary(Cause):
    says = "the draft vocabulary misses tokens of the served answers, and these are never drafted"
    remedy = "train with a larger draft_vocabulary, or on texts like the served ones"

    def measure(self, evidence: Evidence) -> Measurement:
        drafter = evidence.drafter
        ids = getattr(getattr(drafter, "heads", drafter), "vocabulary", None)
        if not isinstance(ids, Tensor):
            return Measurement(False, "the drafter drafts every token")
        texts, rights = evidence.answers
        outside = ~np.isin(texts[:, : rights.counts.shape[1]], ids.cpu().numpy())
        missed = (outside & rights.counts).sum(1) / rights.counts.sum(1).clip(1)
        return Measurement(
            surely_above(missed),
            f"{missed.mean():.1%} of the answers' tokens are none of the {len(ids)}",
        )
