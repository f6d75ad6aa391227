"""The offsets of `d2t` are taken for token ids."""

import torch

from decode.drafters import Drafter
from decode.model.loading import Target
from draftsmith.diagnosis.mistakes import MISTAKES, Mistake, copied, with_heads
from heads.heads_drafter import HeadsDrafter


@MISTAKES.register("d2t_absolute")
class D2tAbsolute(Mistake):
    says = "d2t holds offsets from a row's number to its token's id, and they are taken for ids"
    remedy = "write d2t as this engine reads it: ids in the place of offsets"

    def make(self, drafter: Drafter, target: Target) -> Drafter | None:
        if not isinstance(drafter, HeadsDrafter) or drafter.heads.vocabulary is None:
            return None
        ids = drafter.heads.vocabulary
        offsets = ids - torch.arange(len(ids), device=ids.device)
        return with_heads(drafter, copied(drafter.heads, vocabulary=offsets))
