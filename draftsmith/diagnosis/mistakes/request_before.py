"""What the drafter reads first is a state of the request before."""

from decode.drafters import Drafter
from decode.model.features import Features
from decode.model.loading import Target
from draftsmith.diagnosis.mistakes import MISTAKES, Mistake, with_method
from heads.heads_drafter import HeadsDrafter


@MISTAKES.register("request_before")
class RequestBefore(Mistake):
    says = "the drafter reads states of the request before in the place of this one's"
    remedy = "use a version of the engine that clears the drafter's states between requests"
    seen = "llama-server with MTP, found by this project's own comparison"
    engines = ("llamacpp",)

    def make(self, drafter: Drafter, target: Target) -> Drafter | None:
        if not isinstance(drafter, HeadsDrafter):
            return None
        read = type(drafter).read

        def of_neighbour(self: HeadsDrafter, features: Features, first: int = 0) -> None:
            values = {layer: x.roll(1, 0) for layer, x in features.values.items()}
            read(self, Features(values, features.counts), first)

        return with_method(drafter, "read", of_neighbour)
