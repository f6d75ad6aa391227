"""k chains from one text as one tree with a node budget (SpecInfer, 2305.09781).

Shapes: B rows, k chains, N nodes, V' vocabulary of the drafter.
"""

import numpy as np
import torch
from torch import Tensor

from decode.base.device import to_device
from decode.base.errors import require_whole
from decode.draft import Draft, Limits, Siblings
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling, draw
from decode.shapes import SHAPES, Growth, Shape, greedy_among
from decode.tree_nodes import best, first_equal, largest, likeliest, log_q, pack, renumbered


@SHAPES.register("chains")
class Chains(Shape):
    """k chains from one text as one tree with a node budget, as in SpecInfer.

    chains: the number of chains, k ≥ 1. budget: the max number of nodes, ≥ 1; None: no limit.

    With sampling, each chain draws from q independently, and chains with the same beginning share
    their nodes. A rule for independent siblings is exact only if it judges every draw. So a token
    equal to an earlier sibling stays as a leaf, and only its children move to the earlier one.
    (Rejecting the leaf subtracts q from p once more; a rule that skips it would be another rule.)
    For the same reason the budget applies before tokens are drawn: the tree is the first `budget`
    draws, depth by depth. Dropping drawn tokens by their value or their q would change the text.

    At temperature 0 nothing is drawn. The k likeliest tokens of the root, which differ from each
    other, each start a greedy chain, and the `budget` nodes with the highest path probability stay
    (beside rows that draw: the first `budget` nodes).

    Raises UserError for chains < 1 or budget < 1.
    """

    def __init__(self, *, chains: int, budget: int | None = None) -> None:
        require_whole(chains=chains, budget=1 if budget is None else budget)
        self.chains, self.budget = chains, budget

    def siblings(self, sampling: Sampling) -> Siblings:
        return "chosen" if sampling.greedy else "independent"

    def max_nodes(self, gamma: int) -> int:
        # Greedy chains are fed at full length before the best nodes are selected.
        return self.chains * gamma

    def grow(self, growth: Growth, limits: Limits, sampling: Sampling, rng: CounterRNG) -> Draft:
        if sampling.greedy:
            return self._greedy(growth, limits)
        return self._sampled(growth, limits, sampling, rng)

    def _sampled(
        self, growth: Growth, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        chains, rows, device = self.chains, growth.rows, growth.device
        all_nodes = chains * limits.max_depth
        nodes = all_nodes if self.budget is None else min(self.budget, all_nodes)
        greedy = greedy_among(sampling, growth)
        logits = growth.first()[:, None]
        drawn: list[Tensor] = []
        q: list[Tensor] = []
        sure: list[Tensor] = []
        for begin in range(0, nodes, chains):
            width = min(chains, nodes - begin)
            if limits.grows is not None:
                sure.append(largest(logits).expand(-1, width))
            probs = sampling.probs(logits)
            q.append(growth.over_vocabulary(probs))
            uniforms = rng.uniforms(CounterRNG.DRAFT, begin, width)
            tokens = draw(probs.expand(-1, width, -1), uniforms)
            if greedy is not None and not begin:
                # Their chains begin with different tokens, and go on with the argmax.
                first = likeliest(logits[:, 0], width)
                tokens = torch.where(greedy[:, None], first, tokens)
            drawn.append(tokens)
            following = min(chains, nodes - begin - width)
            if following > 0:
                logits = _next(growth, drawn[-1][:, :following], begin - chains)
        tokens = growth.ids(torch.cat(drawn, 1))
        order = torch.arange(nodes, device=device).expand(rows, -1)
        above = (order - chains).clamp(min=-1)
        depth = len(drawn)
        parents = renumbered(above, first_equal(tokens, above, depth))
        return Draft(
            tokens,
            np.minimum(nodes, chains * limits.depths),
            torch.cat(q, 1),
            parents,
            # Row 0 is the root's q. All chains draw their first token from it.
            above + 1,
            _chosen_rows=sampling.greedy_rows(rows),
            confidence=torch.cat(sure, 1) if sure else None,
        )

    def _greedy(self, growth: Growth, limits: Limits) -> Draft:
        rows, chains = growth.rows, self.chains
        logits = growth.first()[:, None]
        drawn: list[Tensor] = []
        own: list[Tensor] = []  # log q of each token alone
        for depth in range(limits.max_depth):
            tokens = logits.argmax(-1) if depth else likeliest(logits[:, 0], chains)
            drawn.append(tokens)
            if self.budget is not None or limits.grows is not None:
                own.append(log_q(logits.expand(-1, chains, -1), tokens[..., None])[..., 0])
            if depth + 1 < limits.max_depth:
                logits = _next(growth, tokens, (depth - 1) * chains)
        all_tokens = growth.ids(torch.cat(drawn, 1))
        order = torch.arange(all_tokens.shape[1], device=growth.device).expand(rows, -1)
        parents = (order - chains).clamp(min=-1)
        limit = to_device(limits.depths, growth.device)[:, None]
        keep = order // chains < limit
        if self.budget is not None:
            scores = torch.stack(own, 1).cumsum(1).flatten(1)
            keep = best(scores, keep, self.budget)
        confidence = torch.cat(own, 1).exp() if own else None
        return pack(keep, parents).draft(all_tokens, confidence=confidence)


def _next(growth: Growth, tokens: Tensor, first: int) -> Tensor:
    """Feeds one more token of each of the first chains. The parent of chain i's token is the fed
    node first + i, or the root if first < 0."""
    order = torch.arange(tokens.shape[1], device=growth.device)
    parents = order + first if first >= 0 else torch.full_like(order, -1)
    return growth.extend(tokens, parents.expand(growth.rows, -1).contiguous())
