"""What the drafter reads of a prompt is of the request before."""

import torch

from decode.drafters import Drafter
from decode.model.features import Features
from decode.model.loading import Target
from draftsmith.diagnosis.mistakes import MISTAKES, Mistake, with_method
from heads.heads_drafter import HeadsDrafter


@MISTAKES.register("request_before")
class RequestBefore(Mistake):
    says = "the drafter reads states of the request before in the place of this prompt's"
    remedy = "use a version of the engine that clears the drafter's states between requests"
    seen = "not as such; of llama-server's fault with MTP see `entry_before`"

    def make(self, drafter: Drafter, target: Target) -> Drafter | None:
        if not isinstance(drafter, HeadsDrafter):
            return None
        read = type(drafter).read
        left: dict[int, torch.Tensor] = {}  # by layer, of the request before, [n, H]

        def of_the_one_before(self: HeadsDrafter, features: Features, first: int = 0) -> None:
            if not self._has_features[first:].any():  # new rows: these are prompts
                features = Features(
                    {layer: x.clone() for layer, x in features.values.items()}, features.counts
                )
                for layer, states in features.values.items():
                    for row, count in enumerate(features.counts):
                        own = states[row, : int(count)].clone()
                        if len(before := left.get(layer, own)):
                            places = torch.arange(int(count)).clamp(max=len(before) - 1)
                            states[row, : int(count)] = before[places.to(before.device)]
                        left[layer] = own
            read(self, features, first)

        return with_method(drafter, "read", of_the_one_before)
