"""The positions stand still."""

import copy
from typing import Any

from torch import Tensor

from decode.drafters import Drafter
from decode.model.loading import Target
from draftsmith.diagnosis.mistakes import MISTAKES, Mistake, copied, with_heads
from heads.heads_drafter import AttendingDrafter


class _Still:
    """A rotary embedding for which every token is the first."""

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary

    def __call__(self, positions: Tensor, *rest: Any, **options: Any) -> Any:
        return self._rotary(positions * 0, *rest, **options)

    def in_layer(self, number: int, positions: Tensor, *rest: Any) -> Any:
        return self._rotary.in_layer(number, positions * 0, *rest)


@MISTAKES.register("no_positions")
class NoPositions(Mistake):
    says = "the drafter's positions stand still: every token is read as if it were the first"
    remedy = "use a version of the engine that advances the drafter's positions with the text"

    def make(self, drafter: Drafter, target: Target) -> Drafter | None:
        heads = getattr(drafter, "heads", None)
        if not isinstance(drafter, AttendingDrafter) or not hasattr(heads, "_rotary"):
            return None
        still: Any = _Still(copy.copy(drafter.heads._rotary))
        return with_heads(drafter, copied(drafter.heads, _rotary=still))
