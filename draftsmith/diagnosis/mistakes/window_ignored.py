"""The drafter's layers see all of the text."""

from decode.drafters import Drafter
from decode.model.loading import Target
from draftsmith.diagnosis.mistakes import MISTAKES, Mistake, with_heads, with_options
from heads.heads_drafter import AttendingDrafter


@MISTAKES.register("window_ignored")
class WindowIgnored(Mistake):
    says = "the drafter's layers see all of the text, but were trained with a window"
    remedy = "use a version of the engine that keeps to sliding_window of the drafter's config.json"
    seen = "AEON#6"

    def make(self, drafter: Drafter, target: Target) -> Drafter | None:
        if not isinstance(drafter, AttendingDrafter) or drafter.heads.options.window is None:
            return None
        return with_heads(drafter, with_options(drafter.heads, window=None, sinks=0))
