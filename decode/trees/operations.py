"""Per-row trees put in order: nodes left out, equal ones found.

Shapes: B rows, N nodes. parents: int64 [B, N], −1 for the root, as in `Draft`.
"""

import numpy as np
import torch
from torch import Tensor


def pack(keep: Tensor, parents: Tensor) -> tuple[Tensor, Tensor, np.ndarray]:
    """(order [B, n], parents [B, n], sizes [B] on the host) of the nodes that stay, in their order.

    keep: bool [B, N]; a node stays only with its parent. order: which node stands at each place;
    n is the most nodes of a row, and what lies past a row's size is padding.
    """
    sizes = keep.sum(1).cpu().numpy()
    order = (
        keep.logical_not().long().sort(dim=1, stable=True).indices[:, : int(sizes.max(initial=0))]
    )
    place = keep.long().cumsum(1) - 1
    above = parents.gather(1, order)
    moved = place.gather(1, above.clamp(min=0)) if order.shape[1] else above
    # Padding may hang on anything that stands; the root always does.
    stands = keep.gather(1, order) & (above >= 0)
    return order, torch.where(stands, moved, -1), sizes


def first_equal(tokens: Tensor, parents: Tensor, depth: int) -> Tensor:
    """int64 [B, N]: the first node that ends the same text as node i; itself, where there is none.

    tokens: int64 [B, N], parents before children; no node is deeper than `depth`.
    """
    nodes = tokens.shape[1]
    order = torch.arange(nodes, device=tokens.device)
    first = order.expand_as(tokens)
    alike = (tokens[:, :, None] == tokens[:, None, :]) & (order <= order[:, None])
    # Nodes at depth d are settled after d rounds, when those above them are.
    for _ in range(depth):
        above = torch.where(parents < 0, -1, first.gather(1, parents.clamp(min=0)))
        first = (alike & (above[:, :, None] == above[:, None, :])).long().argmax(2)
    return first


def merged(parents: Tensor, first: Tensor) -> Tensor:
    """int64 [B, N]: parents, with children moved to the `first_equal` of the node they hung on."""
    return torch.where(parents < 0, -1, first.gather(1, parents.clamp(min=0)))


def best(scores: Tensor, allowed: Tensor, count: int) -> Tensor:
    """bool [B, N]: each row's `count` allowed nodes of highest score.

    scores: [B, N], no child's above its parent's; parents before children, so that among equal
    scores a parent is taken first. A node with a score of −inf is not allowed.
    """
    allowed = allowed & (scores > -torch.inf)
    order = (
        scores.masked_fill(~allowed, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    )
    taken = torch.zeros_like(allowed).scatter_(1, order[:, :count], True)
    return taken & allowed
