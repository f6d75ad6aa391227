"""The embedding and the state change places before the projection."""

import copy
from typing import Any

from torch import Tensor

from decode.drafters import Drafter
from decode.model.loading import Target
from draftsmith.diagnosis.mistakes import MISTAKES, Mistake, with_heads
from heads.eagle1_heads import Eagle1Heads
from heads.heads_drafter import HeadsDrafter
from heads.mtp_heads import MtpHeads


@MISTAKES.register("inputs_swapped")
class InputsSwapped(Mistake):
    says = "the projection reads the state in the place of the embedding, and the other way round"
    remedy = (
        "swap the halves of the columns of fc (EAGLE-1) or eh_proj (MTP) in the drafter's weights"
    )

    def make(self, drafter: Drafter, target: Target) -> Drafter | None:
        if not isinstance(drafter, HeadsDrafter):
            return None
        if not isinstance(drafter.heads, Eagle1Heads | MtpHeads):
            return None
        heads: Any = copy.deepcopy(drafter.heads)
        parts = [heads.fc] if isinstance(heads, Eagle1Heads) else [x.eh_proj for x in heads.layers]
        for part in parts:
            weight: Tensor = part.weight.data
            part.weight.data = weight.roll(weight.shape[1] // 2, 1)
        return with_heads(drafter, heads)
