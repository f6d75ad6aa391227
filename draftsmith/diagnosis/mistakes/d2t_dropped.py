"""Rows of a draft vocabulary are taken for token ids."""

import torch

from decode.drafters import Drafter
from decode.model.loading import Target
from draftsmith.diagnosis.mistakes import MISTAKES, Mistake, copied, with_heads
from heads.heads_drafter import HeadsDrafter


@MISTAKES.register("d2t_dropped")
class D2tDropped(Mistake):
    says = "the numbers of the draft vocabulary's rows are taken for token ids: d2t is dropped"
    remedy = "keep the tensor d2t in the drafter's weights, or export the full vocabulary"

    def make(self, drafter: Drafter, target: Target) -> Drafter | None:
        if not isinstance(drafter, HeadsDrafter) or drafter.heads.vocabulary is None:
            return None
        rows = torch.arange(drafter.heads.rows, device=drafter.heads.vocabulary.device)
        return with_heads(drafter, copied(drafter.heads, vocabulary=rows))
