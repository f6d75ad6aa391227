"""The drafter's matrices are rounded to four bits."""

import copy

import torch

from decode.drafters import Drafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.model.loading import Target
from draftsmith.diagnosis.mistakes import MISTAKES, Mistake, with_heads
from heads.heads_drafter import HeadsDrafter

LARGEST = 7  # of a signed number of four bits


@torch.no_grad()
def _round(module: torch.nn.Module) -> None:
    """Each row of each matrix gets a scale of its own."""
    for weight in module.parameters():
        if weight.ndim == 2:
            scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / LARGEST
            weight.data = (weight / scale).round() * scale


@MISTAKES.register("four_bits")
class FourBits(Mistake):
    says = "the drafter's weights are rounded to four bits"
    remedy = "serve the drafter with the dtype that it was exported with, without quantisation"
    seen = "SGLang#39087"

    def make(self, drafter: Drafter, target: Target) -> Drafter | None:
        if isinstance(drafter, HeadsDrafter):
            heads = copy.deepcopy(drafter.heads)
            _round(heads)
            return with_heads(drafter, heads)
        if not isinstance(drafter, SmallLMDrafter):
            return None
        model = copy.deepcopy(drafter.lm.model)
        _round(model)
        return SmallLMDrafter(
            model, drafter.vocabulary, drafter.shape, vocab_size=drafter.vocab_size
        )
