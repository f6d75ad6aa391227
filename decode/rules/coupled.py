"""Exact match with drafts that are drawn with the noise of the target's own draws."""

from torch import Tensor

from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.rules import RULES
from decode.rules.exact import ExactMatch


@RULES.register("coupled")
class Coupled(ExactMatch):
    """Exact match, where target and drafter share Gumbel noise G that depends on the seed, the row,
    the position and the token. The drafter drafts argmax(log q + G), the target emits
    argmax(log p + G), and a draft token is accepted if both are equal (Daliri et al., 2408.07978).

    Lossless whatever the drafter does: the target's tokens do not depend on the drafts. So a text
    depends only on the seed, also when the drafter, the policy or the depth of drafts changes. A
    token is accepted with probability ≥ (1 − TV)/(1 + TV); speculative sampling reaches 1 − TV.
    It needs no q, so a draft can be sent as token ids alone. Chains are drawn with the shared
    noise, trees as for every other rule.
    """

    couples = True

    def numbers(self, rng: CounterRNG, depths: Tensor) -> Tensor:
        return rng.text_keys(depths)

    def draw(self, sampling: Sampling, logits: Tensor, numbers: Tensor) -> Tensor:
        return sampling.race(logits, numbers)
