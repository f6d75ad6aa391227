"""Acceptance falls beyond the longest texts of the training."""

from draftsmith.diagnosis.causes import CAUSES, FEWEST, Cause, Measurement, surely_falls
from draftsmith.diagnosis.evidence import Evidence


@CAUSES.register("length")
class Length(Cause):
    says = "acceptance falls at positions beyond those of the training"
    remedy = "raise max_length of the stage and give longer rows, or train with a window"

    def measure(self, evidence: Evidence) -> Measurement:
        _, rights = evidence.answers
        beyond = rights.lengths > evidence.max_length
        before, after = rights.first_by_text(~beyond), rights.first_by_text(beyond)
        if min(len(before), len(after)) < FEWEST:
            return Measurement(
                None,
                f"{len(after)} texts reach beyond max_length, {evidence.max_length} tokens, and "
                f"{len(before)} are within; give {FEWEST} of each",
            )
        return Measurement(
            surely_falls(before, after),
            f"{before.mean():.1%} of the first draft tokens are right within max_length, "
            f"{evidence.max_length} tokens, and {after.mean():.1%} beyond",
        )
