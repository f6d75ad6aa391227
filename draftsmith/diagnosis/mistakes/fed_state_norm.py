"""The next step of a draft reads the state on the other side of the drafter's norm."""

from typing import Any

from torch import nn

from decode.drafters import Drafter
from decode.model.loading import Target
from draftsmith.diagnosis.mistakes import MISTAKES, Mistake, copied, with_heads, with_options
from heads.eagle3_heads import Eagle3Heads
from heads.heads_drafter import HeadsDrafter
from heads.mtp_heads import MtpHeads


@MISTAKES.register("fed_state_norm")
class FedStateNorm(Mistake):
    says = (
        "the steps of a draft read the state before them on the wrong side of the drafter's last "
        "norm: EAGLE-3 reads it before the norm, EAGLE-3.1 and MTP after it"
    )
    remedy = (
        "set norm_output in the config.json of an EAGLE-3 as it was trained, or use a version of "
        "the engine that feeds the right state"
    )
    seen = (
        "vLLM's CPU build 0.32 with GLM-4-MoE's MTP, together with `first_embedding`, found by "
        "this project's own comparison"
    )
    engines = ("vllm",)

    def make(self, drafter: Drafter, target: Target) -> Drafter | None:
        if not isinstance(drafter, HeadsDrafter):
            return None
        heads: Any = drafter.heads
        if isinstance(heads, Eagle3Heads):
            turned = not heads.options.norm_output
            return with_heads(drafter, with_options(heads, norm_output=turned))
        if isinstance(heads, MtpHeads) and len(heads.layers) == 1:
            layer: Any = heads.layers[0]
            plain = nn.ModuleList([copied(layer, post_norm=nn.Identity())])
            # Not the norm itself: a module's parts are no methods.
            read = layer.post_norm.forward
            return with_heads(drafter, copied(heads, layers=plain, readout=read))
        return None
