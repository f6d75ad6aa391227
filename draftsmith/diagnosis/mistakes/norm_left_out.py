"""The drafter's last norm is left out."""

import copy
from typing import Any

from torch import nn

from decode.drafters import Drafter
from decode.model.loading import Target
from draftsmith.diagnosis.mistakes import MISTAKES, Mistake, with_heads
from heads.heads_drafter import HeadsDrafter


@MISTAKES.register("norm_left_out")
class NormLeftOut(Mistake):
    says = "the drafter's last norm is left out, so its output layer reads raw states"
    remedy = "use a version of the engine that applies the drafter's own last norm"

    def make(self, drafter: Drafter, target: Target) -> Drafter | None:
        if not isinstance(drafter, HeadsDrafter):
            return None
        heads: Any = copy.deepcopy(drafter.heads)
        owners = [
            (part, name)
            for part in heads.modules()
            for name, _ in part.named_children()
            if name == "post_norm" or (part is heads and name == "norm")
        ]
        if not owners:
            return None
        for part, name in owners:
            setattr(part, name, nn.Identity())
        return with_heads(drafter, heads)
