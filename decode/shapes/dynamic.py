"""EAGLE-2's tree (2406.16858): grown and pruned by the drafter's confidence, for each row.

Shapes: B rows, k nodes expanded per layer, M candidates, V' vocabulary of the drafter.
"""

import torch
from torch import Tensor

from decode.base.device import to_device
from decode.base.errors import require_whole
from decode.draft import Draft, Limits, Siblings
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.shapes import SHAPES, Growth, Shape
from decode.tree_nodes import best, likeliest, log_q, pack


@SHAPES.register("dynamic")
class Dynamic(Shape):
    """Expand: in each layer, the `width` candidates with the highest score get their `width`
    likeliest tokens as children. Rerank: the draft is the `nodes` candidates with the highest
    score. A node's score is log q summed over its path, with q at temperature 1: the drafter's
    confidence that the full path is accepted.

    Tokens are chosen, not drawn, at any temperature. Raises UserError for width < 1 or nodes < 1.
    """

    def __init__(self, *, width: int = 10, nodes: int = 60) -> None:
        require_whole(width=width, nodes=nodes)
        self.width, self.nodes = width, nodes

    def siblings(self, sampling: Sampling) -> Siblings:
        return "chosen"

    def max_nodes(self, gamma: int) -> int:
        candidates = self.width + (gamma - 1) * self.width**2
        return max(min(self.nodes, candidates), self.width * (gamma - 1))

    def grow(self, growth: Growth, limits: Limits, sampling: Sampling, rng: CounterRNG) -> Draft:
        rows, width, device = growth.rows, self.width, growth.device
        # For each layer of candidates, [B, m] each: tokens (rows of the draft vocabulary), log q of
        # each alone, scores, and the indices of their parents among all candidates.
        tokens, own = _children(growth.first()[:, None], width)
        scores = own
        layers = [(tokens, own, scores, torch.full_like(tokens, -1))]
        # The fed node that is the parent of each candidate.
        fed_parents = torch.full_like(tokens, -1)
        for depth in range(1, limits.max_depth):
            if limits.grows is not None:
                _, log_q_of, _, above = layers[-1]
                if limits.ends(depth, log_q_of.exp(), above):
                    break
            scores_BK, chosen = scores.sort(dim=1, descending=True, stable=True)
            scores_BK, chosen = scores_BK[:, :width], chosen[:, :width]
            begin = 0 if depth == 1 else width + (depth - 2) * width**2
            logits = growth.extend(tokens.gather(1, chosen), fed_parents.gather(1, chosen))
            tokens, own = _children(logits, width)
            scores = scores_BK.repeat_interleave(width, 1) + own
            layers.append((tokens, own, scores, (begin + chosen).repeat_interleave(width, 1)))
            fed = torch.arange(growth.fed.shape[1] - width, growth.fed.shape[1], device=device)
            fed_parents = fed.repeat_interleave(width).expand(rows, -1)
        all_tokens, alone, all_scores, parents = (
            torch.cat(part, 1) for part in zip(*layers, strict=True)
        )
        depths = torch.cat(
            [torch.full_like(layer[0][0], depth + 1) for depth, layer in enumerate(layers)]
        )
        limit = to_device(limits.depths, device)[:, None]
        keep = best(all_scores, depths <= limit, self.nodes)
        return pack(keep, parents).draft(growth.ids(all_tokens), confidence=alone.exp())


def _children(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Tokens and their log q, [B, e·k] each, of the likeliest children of e nodes. logits:
    [B, e, V'], those of the nodes."""
    tokens = likeliest(logits, width)
    return tokens.flatten(1), log_q(logits, tokens).flatten(1)
