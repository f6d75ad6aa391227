"""The drafter knows the train text, and not the served one."""

from draftsmith.diagnosis.causes import CAUSES, Cause, Measurement, surely_falls
from draftsmith.diagnosis.evidence import Evidence


@CAUSES.register("other_prompts")
class OtherPrompts(Cause):
    says = "the drafter is right on the train text, and less on answers to the served prompts"
    remedy = "train on prompts like the served ones, on more of them, or for fewer epochs"

    def measure(self, evidence: Evidence) -> Measurement:
        known = evidence.forced.first_by_text()
        served = evidence.answers[1].first_by_text()
        if not len(known) or not len(served):
            return Measurement(None, "no text has room for a draft")
        return Measurement(
            surely_falls(known, served),
            f"{known.mean():.1%} of the first draft tokens are right on the train text, and "
            f"{served.mean():.1%} on the target's answers to the prompts",
        )
