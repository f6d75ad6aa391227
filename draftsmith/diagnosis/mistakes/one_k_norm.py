"""All layers of a block drafter norm their keys as the first one."""

import copy
from typing import Any

from decode.drafters import Drafter
from decode.model.loading import Target
from draftsmith.diagnosis.mistakes import MISTAKES, Mistake, with_heads
from heads.heads_drafter import HeadsDrafter


@MISTAKES.register("one_k_norm")
class OneKNorm(Mistake):
    says = "the first layer's k_norm is used for the keys of all layers"
    remedy = "use a version of the engine that norms each layer's keys by its own k_norm"
    seen = "vLLM's CPU build 0.32 with DFlash, found by this project's own comparison"
    engines = ("vllm",)

    def make(self, drafter: Drafter, target: Target) -> Drafter | None:
        if not isinstance(drafter, HeadsDrafter):
            return None
        heads: Any = copy.deepcopy(drafter.heads)
        norms = [part for name, part in heads.named_modules() if name.endswith("k_norm")]
        if len(norms) < 2:
            return None
        for norm in norms[1:]:
            norm.weight.data = norms[0].weight.data.clone()
        return with_heads(drafter, heads)
