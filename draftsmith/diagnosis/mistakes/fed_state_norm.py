"""The next step of a draft reads the state on the other side of the drafter's norm."""

from decode.drafters import Drafter
from decode.model.loading import Target
from draftsmith.diagnosis.mistakes import MISTAKES, Mistake, with_heads, with_options
from heads.eagle3_heads import Eagle3Heads
from heads.heads_drafter import HeadsDrafter


@MISTAKES.register("fed_state_norm")
class FedStateNorm(Mistake):
    says = (
        "the steps of a draft read the state before them on the wrong side of the drafter's last "
        "norm: EAGLE-3 reads it before the norm, EAGLE-3.1 after it"
    )
    remedy = "set norm_output in the drafter's config.json as it was trained, or update the engine"

    def make(self, drafter: Drafter, target: Target) -> Drafter | None:
        if not isinstance(drafter, HeadsDrafter) or not isinstance(drafter.heads, Eagle3Heads):
            return None
        turned = not drafter.heads.options.norm_output
        return with_heads(drafter, with_options(drafter.heads, norm_output=turned))
