"""The drafts that arrived, as a drafter, and the rules that judge them."""

from decode.base.errors import UserError
from decode.draft import Contexts, Draft, Limits
from decode.drafters import Drafter
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.loop.parts import Part
from decode.rules import RULES, Rule
from decode.rules.coupled import Coupled
from decode.rules.threshold import Threshold


class ArrivedDrafts(Drafter):
    """Hands out the drafts that arrived. chains: the chains of each running row, in their order."""

    def __init__(self) -> None:
        self.chains: list[list[int]] = []

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        return Draft.chosen(self.chains)


def make_verified_rule(rule: Part) -> Rule:
    """The rule of a verifier. Raises UserError for an unknown rule or option, and for a rule that
    judges by the drafter's probabilities, which are not sent."""
    made: Rule = RULES.make(rule)
    if not isinstance(made, Coupled | Threshold):
        raise UserError(
            f"the rule is {rule}; an edge sends token ids alone, so choose coupled (lossless) or "
            "threshold (lossy)"
        )
    return made
