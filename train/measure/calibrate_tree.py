"""Chooses a tree for a drafter, by acceptance and costs measured on dev prompts.

Shapes: D depths, K ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from decode.base.errors import UserError
from decode.costs import Costs
from decode.drafters import Drafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.model.cache.requirements import require_trees
from decode.model.loading import Target
from decode.settings import DecodeSettings
from decode.shapes import Chain, Shape
from decode.shapes.calibrated import grow_greedily
from decode.shapes.sequoia import TreePlan, plan_tree, smallest_within
from decode.shapes.static import FixedTree
from decode.shapes.structure import Structure
from decode.stats import Counts
from decode.time_costs import CAREFUL_REPEATS, measure_costs
from train.measure.ranks import ALONE, Ranks
from train.measure.tree_acceptance import (
    TreeAcceptance,
    batches_of,
    measure_acceptance,
    probe,
    require_shaped,
)

Method = Literal["calibrated", "sequoia"]
OnProgress = Callable[[str], None]  # called with the name of the next phase
MAX_NODES = 64
WIDE = 3  # nodes on each level of the tree that is used to time drafting


class NothingAccepted(UserError):
    """The target accepted none of the drafter's first tokens, so no tree can be planned."""


@dataclass(frozen=True)
class TreeCalibration:
    """A tree and the measurements behind the choice.

    plan: the chosen tree, with tokens per step and cost per token predicted from the acceptance and
    the costs. best: the plan with the least cost per token. `plan` is the smallest whose cost is at
    most `tolerance` (a share) above that. tree_tokens, chain_tokens: tokens per step that the loop
    really emitted on the same prompts, with the tree and with chains of the same depth.
    """

    method: Method
    plan: TreePlan
    acceptance: TreeAcceptance
    costs: Costs
    tree_tokens: float
    chain_tokens: float
    prompts: int
    temperature: float
    best: TreePlan
    tolerance: float

    @property
    def structure(self) -> Structure:
        return self.plan.structure

    @property
    def verdict(self) -> str:
        tree = self.structure
        speed = 1 / self.plan.cost_per_token
        text = (
            f"{len(tree)} nodes, {tree.depth} deep: {self.tree_tokens:.2f} tokens per step on "
            f"these prompts (predicted: {self.plan.tokens_per_step:.2f}; chains {tree.depth} deep: "
            f"{self.chain_tokens:.2f}); at the measured costs {speed:.2f} times plain decoding"
        )
        if self.best.structure != tree:
            text += (
                f" (the prediction for a tree of {len(self.best.structure)} nodes is "
                f"{1 / self.best.cost_per_token:.2f}; a difference of less than "
                f"{self.tolerance:.1%} is within the noise, so the smaller tree is used)"
            )
        if speed <= 1:
            text += ": drafting does not pay on this machine"
        return text + self.costs.doubt()

    def to_dict(self) -> dict[str, Any]:
        """Converts to JSON values: everything except the paths, which are in the tree's file."""
        return {
            "method": self.method,
            "nodes": len(self.structure),
            "depth": self.structure.depth,
            "promised_tokens_per_step": self.plan.tokens_per_step,
            "promised_cost_per_token": self.plan.cost_per_token,
            "least_cost_per_token": self.best.cost_per_token,
            "nodes_at_least_cost": len(self.best.structure),
            "tolerance": self.tolerance,
            "tokens_per_step": self.tree_tokens,
            "chain_tokens_per_step": self.chain_tokens,
            "prompts": self.prompts,
            "temperature": self.temperature,
            "acceptance": self.acceptance.to_dict(),
            "costs": self.costs.to_dict(),
        }


def calibrate_tree(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    method: Method = "calibrated",
    nodes: int | None = None,
    depth: int = 6,
    width: int = 8,
    sampling: Sampling | None = None,
    max_new_tokens: int = 64,
    seed: int = 0,
    progress: OnProgress = lambda what: None,
    ranks: Ranks = ALONE,
) -> TreeCalibration:
    """Calibrates a tree for any drafter that takes shapes, on prompts (token ids) of the dev split.
    A node has at most the `width` likeliest tokens as children, and the tree is at most `depth`
    deep.

    method: `calibrated` grows the tree by the acceptance of each rank at each depth (2401.10774,
    section 2.3.3) to `nodes` nodes. None: to the number of nodes that is cheapest per token at the
    measured costs. `sequoia` plans the tree by the costs and the acceptance of each rank over all
    depths (2402.12374, section 3.1), with at most `nodes` nodes (None: 64). If costs decide the
    number of nodes, only sizes with a timed pass are compared. The smallest tree is taken whose
    cost per token differs from the least by no more than noise.

    ranks: the processes that share the prompts. All must call this and get the same result. Only
    the first measures costs.

    Raises UserError for a drafter without a shape, a target that cannot verify trees, no prompts,
    an unknown method, if no draft was right, and as `measure_costs` and `Decoder` do.
    """
    if method not in get_args(Method):
        raise UserError(f"method is {method!r}; expected one of {', '.join(get_args(Method))}")
    require_shaped(drafter)
    require_trees(target.model)
    sampling = sampling or Sampling()
    max_depth = drafter.with_shape(Chain()).max_nodes(depth)
    progress("acceptance")
    acceptance = measure_acceptance(
        target.model,
        drafter,
        prompts,
        tree=probe(width, max_depth),
        max_new_tokens=max_new_tokens,
        eos_token_ids=target.eos_token_ids,
        sampling=sampling,
        seed=seed,
        ranks=ranks,
    )
    if not acceptance.hits[0].any():
        raise NothingAccepted(
            f"none of the drafter's {width} likeliest first tokens was accepted in "
            f"{int(acceptance.reached[0, 0])} drafts, so no tree can be planned; train the drafter "
            "more."
        )
    progress("costs")

    def decoder(shape: Shape, depth: int) -> Decoder:
        settings = DecodeSettings(gamma=depth, sampling=sampling)
        return settings.decoder(target, drafter.with_shape(shape))[0]

    # Drafting is timed with a tree too: a level of several nodes costs more than a chain token.
    timed = FixedTree(Structure.of_widths([min(WIDE, width), *[1] * (max_depth - 1)]))
    drafting = decoder(timed, max_depth)
    costs = ranks.main_only(
        lambda: measure_costs(
            drafting,
            [min(prompts, key=len)],
            max_depth=max_depth,
            max_width=(nodes or MAX_NODES) + 1,
            trees=True,
            repeats=CAREFUL_REPEATS,
        )
    )
    best, plan = (
        _best_plan(method, acceptance, costs, nodes, max_depth, tolerance)
        for tolerance in (0.0, costs.noise)
    )

    def tokens(what: str, shape: Shape) -> float:
        progress(what)
        chosen, counts = decoder(shape, plan.structure.depth), Counts.zero()
        for rows in batches_of(len(prompts), 16, ranks):
            batch = [prompts[row] for row in rows]
            counts += chosen.decode(batch, max_new_tokens, seed=seed, row_ids=rows).counts
        return sum(ranks.gather(counts), Counts.zero()).tokens_per_step

    return TreeCalibration(
        method,
        plan,
        acceptance,
        costs,
        tokens("the tree", FixedTree(plan.structure)),
        tokens("chains", Chain()),
        len(prompts),
        sampling.temperature,
        best,
        costs.noise,
    )


def _best_plan(
    method: Method,
    acceptance: TreeAcceptance,
    costs: Costs,
    nodes: int | None,
    depth: int,
    tolerance: float,
) -> TreePlan:
    """The tree of a method, as `calibrate_tree` describes it, at most `depth` deep.

    tolerance: as for `cheapest`. It has no effect if the number of nodes is fixed.
    """
    most = nodes or MAX_NODES
    if method == "sequoia":
        return plan_tree(
            acceptance.by_rank(),
            nodes=most,
            depth=depth,
            draft_cost=costs.per_depth,
            draft_fixed=costs.fixed,
            verify_costs=list(zip(costs.widths, costs.v, strict=True)),
            sizes=_sizes(costs, most),
            tolerance=tolerance,
        )
    table = acceptance.table()
    if nodes is not None:
        return _plan(table, grow_greedily(table, nodes), costs)
    return cheapest(table, costs, tolerance=tolerance)


def _sizes(costs: Costs, max_nodes: int) -> list[int]:
    """Numbers of nodes with a timed pass, at most `max_nodes`: 1, 2, 4, …; always includes
    `max_nodes`.

    Sizes in between would save about 1%. That is less than the difference between two runs on one
    machine, which would then choose different trees.
    """
    return sorted({min(width - 1, max_nodes) for width in costs.widths if width > 1} | {max_nodes})


def cheapest(
    table: Sequence[Sequence[float]],
    costs: Costs,
    max_nodes: int = MAX_NODES,
    tolerance: float = 0.0,
) -> TreePlan:
    """The smallest tree whose cost per token is at most `tolerance` (a share) above the least.

    The candidates are the trees that `grow_greedily` makes from a table of acceptance [D, K], with
    at most `max_nodes` nodes, for the sizes with a timed pass.

    >>> costs = Costs(0.05, 1, 0.1, (1, 2, 3, 4), (1.0, 1.0, 1.0, 2.0))
    >>> cheapest([[0.5, 0.3], [0.4, 0.2]], costs).structure.paths
    [(0,), (1,)]
    """
    plans = [_plan(table, grow_greedily(table, nodes), costs) for nodes in _sizes(costs, max_nodes)]
    return plans[smallest_within([plan.cost_per_token for plan in plans], tolerance)]


def _plan(table: Sequence[Sequence[float]], tree: Structure, costs: Costs) -> TreePlan:
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for path in tree.paths:  # shallow paths first
        chances[path] = chances[path[:-1]] * table[len(path) - 1][path[-1]]
    tokens = sum(chances.values())
    cost = float(costs.draft(tree.depth)) + float(costs.verify(len(tree) + 1))
    return TreePlan(tree, tokens, cost / tokens)
