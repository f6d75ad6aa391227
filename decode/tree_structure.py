"""What follows from the parents of the nodes of token trees.

Shapes: B rows, N nodes, K children of a node. Parents come before their children. The parent −1 is
the root, which is no node.
"""

import numpy as np
import torch
from torch import Tensor


def ancestors_of(parents: np.ndarray) -> np.ndarray:
    """bool [B, N, N]: [b, i, j] is True if node j is node i or one of its ancestors. parents: int64
    [B, N]."""
    rows, nodes = parents.shape
    # Row −1 is the root's, which has no ancestors.
    seen = np.zeros((rows, nodes + 1, nodes), dtype=bool)
    row = np.arange(rows)
    for node in range(nodes):
        seen[:, node] = seen[row, parents[:, node]]
        seen[:, node, node] = True
    return seen[:, :nodes]


def grown_ancestors(ancestors: Tensor | None, parents: Tensor) -> Tensor:
    """bool [B, N, N]: `ancestors_of` trees that got new nodes. ancestors: before that; None: there
    were no nodes. parents: int64 [B, n], those of the new nodes."""
    rows, count = parents.shape
    before = 0 if ancestors is None else ancestors.shape[1]
    total = before + count
    seen = torch.zeros(rows, total, total, dtype=torch.bool, device=parents.device)
    if ancestors is not None:
        seen[:, :before, :before] = ancestors
        above = seen.gather(1, parents.clamp(min=0)[..., None].expand(-1, -1, total))
        seen[:, before:] = above & (parents >= 0)[..., None]
    new = torch.arange(before, total, device=parents.device)
    seen[:, new, new] = True
    return seen


def with_root(ancestors: Tensor) -> tuple[Tensor, Tensor]:
    """bool [B, N+1, N+1]: `ancestors_of` trees whose root comes first, as a token that every node
    sees; and int64 [B, N+1], how deep each token is."""
    # Not `torch.nn.functional.pad`, whose checks take longer.
    seen = torch.constant_pad_nd(ancestors, (1, 0, 1, 0))
    seen[:, :, 0] = True
    return seen, seen.sum(2) - 1


def path_of(ancestors: Tensor, nodes: Tensor) -> Tensor:
    """int64 [B, N]: node nodes[b], int64 [B], and its ancestors, from the root down. Entries past
    its depth are padding. −1 means the root, which has an empty path."""
    count = ancestors.shape[1]
    at = nodes.clamp(min=0)[:, None, None].expand(-1, 1, count)
    on_path = ancestors.gather(1, at)[:, 0] & (nodes >= 0)[:, None]
    # Parents come before children, so sorting the nodes of a path by index sorts them by depth.
    order = torch.where(on_path, torch.arange(count, device=nodes.device), count)
    return order.sort(1).values.clamp(max=max(count - 1, 0))


def down_the_paths(
    values: np.ndarray, parents: np.ndarray, levels: int, joined: np.ufunc
) -> np.ndarray:
    """[B, N]: the values of a node and of its ancestors, joined in that order from the root down.
    values, parents: [B, N]. levels: no node is deeper. joined: one with an identity, as `add`.

    >>> down_the_paths(np.array([[1, 2, 4]]), np.array([[-1, 0, 0]]), 2, np.add).tolist()
    [[1, 3, 5]]
    """
    rows, nodes = values.shape
    found = np.full((rows, nodes + 1), joined.identity, dtype=values.dtype)  # the root is the last
    found[:, :-1] = values
    above = parents % (nodes + 1) + (nodes + 1) * np.arange(rows)[:, None]
    for _ in range(levels - 1):
        found[:, :-1] = joined(found.ravel()[above], values)
    return found[:, :-1]


def leaf_paths(seen: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The paths of token trees down to their leaves, and the place of each node on one of them.

    seen: bool [B, n, m], for trees of m nodes, those that each of the last n may see. counts: int
    [B], the first of these n that are no padding. Returns int [B, P, D], the nodes of each path by
    depth, and int [B, n], p·D + d for a node of path p at depth d. Past its end a path has any
    other nodes, and rows with fewer leaves have any other paths.
    """
    n, m = seen.shape[1:]
    real = np.arange(n) < counts[:, None]
    leaf = real & ((seen[:, :, m - n :] & real[:, :, None]).sum(1) == 1)
    levels = seen.sum(2)
    depth = max(int((levels * real).max()), 1)
    leaves = np.argsort(~leaf, axis=1, kind="stable")[:, : max(int(leaf.sum(1).max()), 1)]
    on_path = np.take_along_axis(seen, leaves[:, :, None], 1)
    nodes = np.argsort(~on_path, axis=2, kind="stable")[:, :, :depth]
    path = on_path[:, :, m - n :].argmax(1)
    return nodes, path * depth + np.minimum(levels, depth) - 1


def children_of(parents: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """int64 [B, N+1, K], K ≥ 1: row r lists the children of node r−1 in order (row 0: of the root)
    among the first sizes[b] nodes, filled up with −1. parents: int64 [B, N]."""
    counts = counts_of_children(parents, sizes)
    row, node = _inside(parents, sizes)
    above = parents[row, node] + 1
    order = np.lexsort((node, above, row))  # siblings side by side
    row, node, above = row[order], node[order], above[order]
    first = counts.cumsum().reshape(counts.shape) - counts  # of the children of each node
    table = np.full((*counts.shape, max(int(counts.max(initial=0)), 1)), -1)
    table[row, above, np.arange(len(node)) - first[row, above]] = node
    return table


def counts_by_depth(parents: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """int [B, D]: how many of its first sizes[b] nodes row b has at depth 1, 2, … D. parents: int64
    [B, N]."""
    rows, nodes = parents.shape
    row, node = _inside(parents, sizes)
    above = np.full((rows, nodes + 1), -1)
    above[row, node] = parents[row, node]
    depth_BN = np.ones_like(above)
    depth_BN[:, -1] = 0
    # −1 wraps around to the root. Each round doubles the distance up to `above`.
    while (above >= 0).any():
        depth_BN = depth_BN + np.take_along_axis(depth_BN, above % (nodes + 1), 1)
        above = np.take_along_axis(above, above % (nodes + 1), 1)
    depths = depth_BN[row, node]
    counts = np.zeros((rows, int(depths.max(initial=0))), dtype=np.int64)
    np.add.at(counts, (row, depths - 1), 1)
    return counts


def counts_of_children(parents: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """int [B, N+1]: how many of its first sizes[b] nodes are children of node i−1 of row b (i = 0:
    of the root). parents: int64 [B, N]."""
    rows, nodes = parents.shape
    counts = np.zeros((rows, nodes + 1), dtype=np.int64)
    row, node = _inside(parents, sizes)
    np.add.at(counts, (row, parents[row, node] + 1), 1)
    return counts


def _inside(parents: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The (row, node) of each node that is not padding."""
    row, node = np.nonzero(np.arange(parents.shape[1]) < sizes[:, None])
    return row, node
