"""Heads that do not see the tokens of earlier heads: Medusa's and Blockwise's.

Shapes: B rows, F features of a token, D heads, d ≤ D of them, H hidden size, V' draft vocabulary.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor

from decode.draft import Contexts
from decode.sampling import Sampling
from decode.trees import Growth
from heads.base import Given, Heads, Prediction, trained_places
from heads.drafter import HeadsDrafter


class ParallelHeads(Heads):
    """Heads that read only the features of one token. A subclass defines only `states`."""

    @abstractmethod
    def states(self, features: Tensor, depths: Sequence[int]) -> Tensor:
        """[n, d, H]: the states for features [n, F]. depths: which of the heads 1 … D."""

    def predictions(self, given: Given, depths: Sequence[int]) -> Iterator[Prediction]:
        places = {depth: trained_places(given.loss_mask, depth) for depth in depths}
        # All heads read most tokens, so shared parts are computed once per token.
        read = reduce(torch.logical_or, places.values())
        features = torch.cat([given.features[layer][read] for layer in self.captured_layers], -1)
        states = self.states(features.to(self.dtype), depths)
        for column, (depth, own) in enumerate(places.items()):
            yield Prediction(depth, own, states[own[read], column])


class ParallelHeadsDrafter(HeadsDrafter):
    """Drafts with all heads at once, from the hidden states of the last token that has any.

    The head of a depth predicts the children at this depth. It does not depend on the token of the
    parent node. So all nodes at one depth have the same q. This q is still the true draft
    distribution.
    """

    heads: ParallelHeads

    def growth(self, contexts: Contexts, sampling: Sampling, deepest: int) -> Growth:
        return _Growth(self, contexts, sampling, deepest)


class _Growth(Growth):
    def __init__(
        self, drafter: ParallelHeadsDrafter, contexts: Contexts, sampling: Sampling, deepest: int
    ) -> None:
        heads, state = drafter.heads, drafter.last
        super().__init__(contexts, sampling, state.device, drafter.vocab_size, heads.vocabulary)
        self.logits = heads.output.logits(heads.states(state, range(1, deepest + 1)))  # [B, d, V']

    def _first(self) -> Tensor:
        return self.logits[:, 0]

    def _extend(self, count: int) -> Tensor:
        if self.ancestors is None:
            fed = self.fed.shape[1]
            return self.logits[:, fed - count + 1 : fed + 1]
        depths = self.ancestors[:, -count:].sum(2)
        return self.logits[torch.arange(self.rows, device=self.device)[:, None], depths]
