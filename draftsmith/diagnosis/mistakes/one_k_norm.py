"""All layers of a block drafter norm the keys of the text as the first one."""

from typing import Any

from torch import nn

from decode.drafters import Drafter
from decode.model.loading import Target
from draftsmith.diagnosis.mistakes import MISTAKES, Mistake, copied, with_heads
from heads.dflash_heads import DFlashHeads
from heads.heads_drafter import HeadsDrafter


@MISTAKES.register("one_k_norm")
class OneKNorm(Mistake):
    says = "the first layer's k_norm is used for the text's keys in all layers"
    remedy = "use a version of the engine that norms each layer's keys by its own k_norm"
    seen = "vLLM's CPU build 0.32 with DFlash, found by this project's own comparison"
    engines = ("vllm",)

    def make(self, drafter: Drafter, target: Target) -> Drafter | None:
        if not isinstance(drafter, HeadsDrafter) or not isinstance(drafter.heads, DFlashHeads):
            return None
        layers: Any = drafter.heads.layers
        if len(layers) < 2:
            return None
        norm = layers[0].self_attn.k_norm
        alike = [copied(x, self_attn=copied(x.self_attn, k_norm=norm)) for x in layers]
        of_text: Any = copied(drafter.heads, layers=nn.ModuleList(alike))
        # The keys of the block's own tokens have their own norms.
        return with_heads(drafter, copied(drafter.heads, context=of_text.context))
