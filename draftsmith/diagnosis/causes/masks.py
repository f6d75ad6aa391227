"""The loss is also on prompts."""

import numpy as np

from draftsmith.diagnosis.causes import CAUSES, Cause, Measurement, surely_above
from draftsmith.diagnosis.evidence import Evidence, find


@CAUSES.register("masks")
class Masks(Cause):
    says = "the loss is on tokens of prompts, too, which no target writes"
    remedy = "give rows with prompt and response, or messages: then only responses are trained on"

    def measure(self, evidence: Evidence) -> Measurement:
        _, end = evidence.marks
        if not end:
            return Measurement(None, "the prompts end with nothing in common")
        shares = []
        for sample in evidence.samples:
            place = find(end, sample.tokens)
            if place is not None and any(sample.mask):
                before = sum(sample.mask[: place + len(end)])
                shares.append(before / sum(sample.mask))
        if not shares:
            return Measurement(None, "no train text has what stands before an answer")
        found = np.array(shares)
        return Measurement(
            surely_above(found), f"{found.mean():.1%} of the trained tokens are before the answer"
        )
