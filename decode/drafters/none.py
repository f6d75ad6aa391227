"""No drafter: plain decoding in the same loop. Every speed-up is measured against it."""

from decode.draft import Draft
from decode.drafters import DRAFTERS, Contexts, Drafter, Limits
from decode.sampling import CounterRNG, Sampling


@DRAFTERS.register("none")
class NoDrafter(Drafter):
    """Drafts nothing, so that each verification pass emits one token."""

    def start(self, contexts: Contexts) -> None:
        return None

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        return Draft.none(len(contexts.lengths), "cpu")
