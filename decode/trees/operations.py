"""Operations on per-row trees: remove nodes, find equal ones, select the best.

Shapes: B rows, N nodes. parents: int64 [B, N], −1 for the root, as in `Draft`.
"""

import numpy as np
import torch
from torch import Tensor


def pack(keep: Tensor, parents: Tensor) -> tuple[Tensor, Tensor, np.ndarray]:
    """(order [B, n], parents [B, n], sizes [B] on the host) of the kept nodes, in the same order.

    keep: bool [B, N]. A node may be kept only with its parent. order: the old index of the node at
    each new place. n: the largest size of a row. Places past a row's size are padding.
    """
    sizes = keep.sum(1).cpu().numpy()
    order = (
        keep.logical_not().long().sort(dim=1, stable=True).indices[:, : int(sizes.max(initial=0))]
    )
    place = keep.long().cumsum(1) - 1
    above = parents.gather(1, order)
    moved = place.gather(1, above.clamp(min=0)) if order.shape[1] else above
    # The parent of padding can be any kept node. The root is always kept.
    stands = keep.gather(1, order) & (above >= 0)
    return order, torch.where(stands, moved, -1), sizes


def first_equal(tokens: Tensor, parents: Tensor, depth: int) -> Tensor:
    """int64 [B, N]: the first node with the same token path as node i; i itself if it is the first.

    tokens: int64 [B, N], parents before children. depth: no node is deeper.
    """
    nodes = tokens.shape[1]
    order = torch.arange(nodes, device=tokens.device)
    first = order.expand_as(tokens)
    alike = (tokens[:, :, None] == tokens[:, None, :]) & (order <= order[:, None])
    # Nodes at depth d are final after d rounds, because those above them are final earlier.
    for _ in range(depth):
        above = torch.where(parents < 0, -1, first.gather(1, parents.clamp(min=0)))
        first = (alike & (above[:, :, None] == above[:, None, :])).long().argmax(2)
    return first


def merged(parents: Tensor, first: Tensor) -> Tensor:
    """int64 [B, N]: the parents, each replaced by its `first_equal` node."""
    return torch.where(parents < 0, -1, first.gather(1, parents.clamp(min=0)))


def best(scores: Tensor, allowed: Tensor, count: int) -> Tensor:
    """bool [B, N]: the `count` allowed nodes of each row with the highest scores.

    scores: [B, N]. A child's score is at most its parent's. Parents come before children, so that
    a parent is taken first if scores are equal. A node with score −inf is not allowed.
    """
    allowed = allowed & (scores > -torch.inf)
    order = (
        scores.masked_fill(~allowed, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    )
    taken = torch.zeros_like(allowed).scatter_(1, order[:, :count], True)
    return taken & allowed
