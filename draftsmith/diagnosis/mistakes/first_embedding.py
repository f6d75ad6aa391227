"""The first entry of a text has no embedding."""

from typing import Any

from torch import Tensor

from decode.drafters import Drafter
from decode.model.loading import Target
from draftsmith.diagnosis.mistakes import MISTAKES, Mistake, copied, with_heads, with_method
from heads.heads_drafter import HeadsDrafter
from heads.mtp_heads import MtpHeads


@MISTAKES.register("first_embedding")
class FirstEmbedding(Mistake):
    says = "the first entry of a text reads zeros in the place of its token's embedding"
    remedy = "use a version of the engine that reads the embedding at every position"
    seen = (
        "vLLM's CPU build 0.32 with GLM-4-MoE's MTP, together with `fed_state_norm`, found by this "
        "project's own comparison"
    )
    engines = ("vllm",)

    def make(self, drafter: Drafter, target: Target) -> Drafter | None:
        if not isinstance(drafter, HeadsDrafter) or not isinstance(drafter.heads, MtpHeads):
            return None
        kind: Any = type(drafter.heads)

        def step(self: Any, states: Tensor, tokens: Tensor, positions: Tensor, *rest: Any) -> Any:
            reading = copied(self)
            reading._modules.pop("embeddings", None)
            reading.embeddings = lambda ids: self.embeddings(ids) * (positions > 0)[..., None]
            return kind.step(reading, states, tokens, positions, *rest)

        return with_heads(drafter, with_method(drafter.heads, "step", step))
