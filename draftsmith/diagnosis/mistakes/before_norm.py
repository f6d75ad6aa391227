"""The target's last state is taken before its final norm."""

from decode.drafters import Drafter
from decode.model.hidden_states import FINAL
from decode.model.loading import Target
from draftsmith.diagnosis.mistakes import MISTAKES, Mistake, copied, with_heads
from heads.heads_drafter import HeadsDrafter


@MISTAKES.register("before_norm")
class BeforeNorm(Mistake):
    says = "the drafter gets the target's last state before the final norm, not after it"
    remedy = "use a version of the engine that hands the normed state to this kind of drafter"
    seen = "LightLLM#1402"

    def make(self, drafter: Drafter, target: Target) -> Drafter | None:
        if not isinstance(drafter, HeadsDrafter) or FINAL not in drafter.captured_layers:
            return None
        last = target.model.config.get_text_config().num_hidden_layers - 1
        layers = tuple(last if layer == FINAL else layer for layer in drafter.captured_layers)
        return with_heads(drafter, copied(drafter.heads, captured_layers=layers))
