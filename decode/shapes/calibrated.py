"""Medusa's calibrated tree (2401.10774, section 2.3.3): the nodes that were accepted most often.

`train.measure.calibrate_tree` measures the acceptance on dev prompts.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from decode.base.errors import UserError, require_whole
from decode.shapes import SHAPES
from decode.shapes.static import Draws, FixedTree
from decode.shapes.structure import Structure


def grow_greedily(table: Sequence[Sequence[float]] | np.ndarray, nodes: int) -> Structure:
    """The tree of at most `nodes` nodes with the most accepted tokens on average, if acceptance at
    one depth does not depend on the ranks above it.

    table: [D, K], the probability that the candidate of rank r at depth d + 1 is the right token,
    given that all tokens before it were right. A node adds the product along its path to the
    accepted tokens. The node that adds most comes next; among equal ones the shallower, then the
    likelier. Nodes that add nothing are left out. Raises UserError for nodes < 1, and for a table
    that holds other values than probabilities, or has only zeros for the first depth.

    >>> grow_greedily([[0.6, 0.3], [0.5, 0.2]], 4).paths
    [(0,), (1,), (0, 0), (1, 0)]
    """
    require_whole(nodes=nodes)
    table = _checked(table)
    # Sorted by falling probability, because the ranks of a depth are not always in that order.
    ranks = np.argsort(-table, axis=1, kind="stable")
    chances = np.take_along_axis(table, ranks, axis=1)

    def entry(above: float, path: tuple[int, ...], index: int) -> tuple[float, int, tuple, tuple]:
        """A heap entry for a child of `path`. index: where its rank is in the sorted ranks."""
        chance = above * float(chances[len(path), index])
        child = (*path, int(ranks[len(path), index]))
        return -chance, len(child), child, (above, path, index)

    waiting = [entry(1.0, (), 0)]
    paths: list[tuple[int, ...]] = []
    while waiting and len(paths) < nodes:
        negative, depth, path, (above, parent, index) = heapq.heappop(waiting)
        if negative == 0:
            break
        paths.append(path)
        if index + 1 < table.shape[1]:
            heapq.heappush(waiting, entry(above, parent, index + 1))
        if depth < len(table):
            heapq.heappush(waiting, entry(-negative, path, 0))
    if not paths:
        raise UserError("the acceptance table is 0 for all first tokens, so no tree can be made")
    return Structure(paths)


def _checked(table: Sequence[Sequence[float]] | np.ndarray) -> np.ndarray:
    try:
        values = np.array(table, dtype=np.float64)
    except (TypeError, ValueError):
        values = np.zeros(0)
    if values.ndim != 2 or not values.size:
        raise UserError(
            f"the acceptance table has shape {list(values.shape)}; expected [D, K]: one row for "
            "each depth and one column for each rank, with rows of equal length"
        )
    # At most one candidate is right at each depth.
    if not (np.isfinite(values) & (values >= 0)).all() or (values.sum(1) > 1 + 1e-6).any():
        raise UserError(
            "the acceptance table has values that are not probabilities; expected numbers in "
            "[0, 1] that sum to at most 1 at each depth"
        )
    return values


@SHAPES.register("calibrated")
class Calibrated(FixedTree):
    """The tree that `grow_greedily` makes from a measured table [D, K], with `nodes` nodes."""

    def __init__(
        self, *, table: Sequence[Sequence[float]], nodes: int, draw: Draws = "top"
    ) -> None:
        super().__init__(grow_greedily(table, nodes), draw)
