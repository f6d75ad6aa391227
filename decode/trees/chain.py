"""A chain: a tree without branches, γ tokens one after the other (2211.17192)."""

import torch
from torch import Tensor

from decode.draft import Draft, Limits, Siblings
from decode.sampling import CounterRNG, Sampling, argmax, draw
from decode.trees import SHAPES, Shape
from decode.trees.growth import Growth


@SHAPES.register("chain")
class Chain(Shape):
    """Draws one token after the other (greedy: the argmax). The only shape that a draft-length
    policy can stop while it grows."""

    branches = False

    def siblings(self, sampling: Sampling) -> Siblings:
        return "chosen" if sampling.greedy else "independent"

    def most_nodes(self, gamma: int) -> int:
        return gamma

    def grow(self, growth: Growth, limits: Limits, sampling: Sampling, rng: CounterRNG) -> Draft:
        sizes = limits.depths.copy()
        tokens: list[Tensor] = []
        q: list[Tensor] = []
        logits = growth.first()
        for place in range(limits.deepest):
            if limits.stops is not None:
                # One device transfer per token, only for policies that read the logits.
                ended = limits.stops(place, logits, sizes > place).cpu().numpy()
                sizes[ended & (sizes > place)] = place
                if not (sizes > place).any():
                    break
            if sampling.greedy:
                drawn = argmax(logits)
            else:
                probs = sampling.probs(logits)
                drawn = draw(probs, rng.uniforms(CounterRNG.DRAFT, place, 1)[:, 0])
                q.append(growth.whole(probs))
            tokens.append(drawn)
            if place + 1 < int(sizes.max()):
                logits = growth.extend(drawn[:, None])[:, 0]
        if not tokens:
            return Draft.none(growth.rows, growth.device)
        return Draft(growth.ids(torch.stack(tokens, 1)), sizes, q=torch.stack(q, 1) if q else None)
