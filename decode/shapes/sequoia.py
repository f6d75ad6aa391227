"""Sequoia's tree (2402.12374, section 3.1): by dynamic programming, with measured costs.

Shapes: M max number of nodes, including the root (the last committed token); L max depth; K max
number of children of a node.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from decode.base.errors import UserError, require_whole
from decode.shapes import SHAPES
from decode.shapes.static import Draws, FixedTree
from decode.shapes.structure import Structure


@dataclass(frozen=True)
class TreePlan:
    """The best tree. tokens_per_step: the tokens it emits on average, including the target's token.
    cost_per_token: the cost of such a token, in the unit of the costs. For plain decoding it is
    the cost of a pass of width 1. Drafting pays off if cost_per_token is lower."""

    structure: Structure
    tokens_per_step: float
    cost_per_token: float


def plan_tree(
    acceptance: Sequence[float],
    *,
    nodes: int,
    depth: int,
    draft_cost: float = 0.0,
    draft_fixed: float = 0.0,
    verify_costs: Sequence[Sequence[float]] = ((1, 1.0),),
    sizes: Sequence[int] | None = None,
    tolerance: float = 0.0,
) -> TreePlan:
    """The tree of 1 … `nodes` drafted nodes, 1 … `depth` deep, with the least cost per token.

    acceptance: [K], the probability v_b that the b-th child of an accepted node is accepted.
    draft_cost: the cost of one level of the draft. draft_fixed: the cost of a draft that does not
    depend on its depth. verify_costs: (width, cost) of target passes,
    ascending by width, the number of tokens fed. Between widths the cost is linear; beyond the
    last it is constant. All costs have one unit, such as plain steps. sizes: the allowed numbers of
    nodes; None: any. tolerance: the smallest tree is taken whose cost per token is at most this
    share above the least.

    Raises UserError for nodes < 1, depth < 1, or values that are not probabilities or costs.
    """
    require_whole(nodes=nodes, depth=depth)
    v = _probabilities(acceptance)
    widths, costs = _costs(draft_cost, draft_fixed, verify_costs)
    program = _DynamicProgram(v, nodes + 1, depth)
    allowed = range(1, nodes + 1) if sizes is None else sorted(set(sizes) & {*range(1, nodes + 1)})
    passes = np.array(allowed) + 1
    levels = np.arange(1, depth + 1)[:, None]
    tokens = program.tokens[levels, passes]  # −∞ for more nodes than fit into the levels
    spent = draft_fixed + levels * draft_cost + np.interp(passes, widths, costs)
    cost = np.where(tokens > 0, spent / tokens, np.inf)
    # Among trees of one size and equal cost, take the shallowest.
    shallow = cost.argmin(0)
    at = smallest_within(cost.min(0), tolerance)
    level, size = int(shallow[at]) + 1, int(passes[at])
    structure = Structure(program.paths(level, size))
    return TreePlan(structure, float(program.tokens[level, size]), float(cost[level - 1, at]))


def smallest_within(costs: Sequence[float] | np.ndarray, tolerance: float) -> int:
    """The first index with a cost at most `tolerance` (a share) above the least cost."""
    cost = np.asarray(costs)
    return int((cost <= (1 + tolerance) * cost.min()).argmax())


class _DynamicProgram:
    """T[l, b, m]: the max number of tokens that a tree of m nodes can emit, if its root has b
    children and at most l levels below it. tokens[l, m]: the max over b.

    T[l, 0, 1] = 1;  T[l, b, m] = max over y of T[l, b−1, y] + v_b · tokens[l−1, m−y]: the b-th
    child's subtree has m − y of the nodes. Impossible cases are −∞.
    """

    def __init__(self, v: np.ndarray, max_nodes: int, depth: int) -> None:
        children = min(len(v), max_nodes - 1)
        self.T = np.full((depth + 1, children + 1, max_nodes + 1), -np.inf)
        self.split = np.zeros(self.T.shape, dtype=np.int64)  # the y of the maximum
        self.tokens = np.full((depth + 1, max_nodes + 1), -np.inf)
        self.children = np.zeros((depth + 1, max_nodes + 1), dtype=np.int64)  # the b of the maximum
        self.T[:, 0, 1] = self.tokens[0, 1] = 1.0
        for level in range(1, depth + 1):
            for b in range(1, children + 1):
                elder, below = self.T[level, b - 1], self.tokens[level - 1]
                # Impossible cases stay −∞ also if v_b is 0: 0·∞ would be NaN.
                below = np.multiply(v[b - 1], below, where=below > 0, out=below.copy())
                for m in range(b + 1, max_nodes + 1):
                    tokens = elder[1:m] + below[m - 1 : 0 : -1]
                    y = int(tokens.argmax())
                    self.T[level, b, m], self.split[level, b, m] = tokens[y], y + 1
            self.children[level] = self.T[level].argmax(0)
            self.tokens[level] = self.T[level].max(0)

    def paths(self, level: int, size: int) -> list[tuple[int, ...]]:
        """The nodes of the best tree, without the root."""
        paths: list[tuple[int, ...]] = []
        for b in range(int(self.children[level, size]), 0, -1):
            y = int(self.split[level, b, size])
            paths.append((b - 1,))
            paths += [(b - 1, *path) for path in self.paths(level - 1, size - y)]
            size = y
        return paths


def _probabilities(acceptance: Sequence[float]) -> np.ndarray:
    try:
        v = np.array(acceptance, dtype=np.float64)
    except (TypeError, ValueError):
        v = np.zeros(0)
    if v.ndim != 1 or not v.size or not (np.isfinite(v) & (v >= 0)).all() or v.sum() > 1 + 1e-6:
        raise UserError(
            f"acceptance by child is {acceptance!r}; expected a list of probabilities (first "
            "child, second child, …) that sum to at most 1"
        )
    return v


def _costs(
    draft_cost: float, draft_fixed: float, verify_costs: Sequence[Sequence[float]]
) -> np.ndarray:
    """float [2, n]: widths and costs."""
    try:
        pairs = np.array(verify_costs, dtype=np.float64)
    except (TypeError, ValueError):
        pairs = np.zeros(0)
    fits = pairs.ndim == 2 and pairs.shape[1] == 2 and len(pairs) > 0
    if (
        not fits
        or not (np.isfinite(pairs) & (pairs > 0)).all()
        or (np.diff(pairs[:, 0]) <= 0).any()
    ):
        raise UserError(
            f"verify_costs is {verify_costs!r}; expected pairs [width, cost] of numbers > 0, "
            "widths ascending"
        )
    for name, value in (("draft_cost", draft_cost), ("draft_fixed", draft_fixed)):
        if not np.isfinite(value) or value < 0:
            raise UserError(f"{name} is {value!r}; expected a number ≥ 0")
    return pairs.T


@SHAPES.register("sequoia")
class Sequoia(FixedTree):
    """The tree of `plan_tree`, kept as `plan`. As in the paper, tokens are drawn without
    replacement by default. At temperature 0 they are the likeliest."""

    def __init__(
        self,
        *,
        acceptance: Sequence[float],
        nodes: int = 64,
        depth: int = 8,
        draft_cost: float = 0.0,
        draft_fixed: float = 0.0,
        verify_costs: Sequence[Sequence[float]] = ((1, 1.0),),
        draw: Draws = "distinct",
    ) -> None:
        self.plan = plan_tree(
            acceptance,
            nodes=nodes,
            depth=depth,
            draft_cost=draft_cost,
            draft_fixed=draft_fixed,
            verify_costs=verify_costs,
        )
        super().__init__(self.plan.structure, draw)
