"""Chooses a tree for a drafter, by acceptance and costs measured on dev prompts.

To measure how often the target accepts each candidate of the drafter, the loop decodes the prompts
with exact match and a probe tree of the drafter's likeliest tokens. So the counts are about the
tokens that the target emits (greedy or drawn).

Shapes: D depths, K ranks, N nodes of the probe.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
from transformers import PreTrainedModel

from decode.drafters import Drafter
from decode.drafters.trained import ShapedDrafter
from decode.errors import UserError
from decode.loop import Decoder
from decode.measure.costs import Costs, busy
from decode.measure.ranks import ALONE, Ranks
from decode.measure.time_costs import CAREFUL_REPEATS, measure_costs
from decode.sampling import Sampling
from decode.settings import DecodeSettings
from decode.stats import Counts
from decode.target.cache.cached_model import require_trees
from decode.target.loading import Target
from decode.trees import Chain, Shape, require_whole
from decode.trees.calibrated import grow_greedily
from decode.trees.sequoia import TreePlan, plan_tree, smallest_within
from decode.trees.static import FixedTree
from decode.trees.structure import Structure
from decode.verification import Verification

Method = Literal["calibrated", "sequoia"]
OnProgress = Callable[[str], None]  # called with the name of the next phase
MAX_NODES = 64
WIDE = 3  # nodes on each level of the tree that is used to time drafting


@dataclass(frozen=True)
class Acceptance:
    """hits, reached: int [D, K], for candidates of rank r at depth d + 1. hits: how often the
    candidate was the next token. reached: how often one was judged after all before it were
    accepted."""

    hits: np.ndarray
    reached: np.ndarray

    def table(self) -> list[list[float]]:
        """[D, K]: the share of right candidates, 0 if none was judged. For `calibrated`."""
        return _share(self.hits, self.reached)

    def by_rank(self) -> list[float]:
        """[K]: the same share over all depths. For `sequoia`."""
        return _share(self.hits.sum(0), self.reached.sum(0))

    def to_dict(self) -> dict[str, Any]:
        """Converts the counts and the table to JSON values."""
        return {
            "hits": self.hits.tolist(),
            "reached": self.reached.tolist(),
            "table": self.table(),
        }


def _share(hits: np.ndarray, reached: np.ndarray) -> Any:
    return (hits / np.maximum(reached, 1)).tolist()


def probe(width: int, depth: int) -> Structure:
    """A tree with `width` candidates at each depth, all children of nodes on the likeliest path.

    >>> probe(2, 2).paths
    [(0,), (1,), (0, 0), (0, 1)]
    """
    require_whole(width=width, depth=depth)
    return Structure([(*[0] * above, rank) for above in range(depth) for rank in range(width)])


def require_shaped(drafter: Drafter) -> ShapedDrafter:
    """Returns the drafter. Raises UserError if it does not take shapes."""
    if not isinstance(drafter, ShapedDrafter):
        raise UserError(
            f"{type(drafter).__name__} does not take a shape, so no tree can be calibrated for it"
        )
    return drafter


def measure_acceptance(
    model: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    tree: Structure,
    max_new_tokens: int = 64,
    eos_token_ids: Sequence[int] = (),
    sampling: Sampling | None = None,
    batch_size: int = 16,
    seed: int = 0,
    ranks: Ranks = ALONE,
) -> Acceptance:
    """Measures the acceptance of the nodes of `tree` (see `probe`) on these prompts. Use dev
    prompts.

    drafter: a drafter that takes shapes. Its shape is restored afterwards. ranks: the processes
    that share the prompts; all of them get the sums. Paths outside `tree` are not measured: with
    `probe`, deeper candidates are counted only after the likeliest ones. Tokens past the end of a
    text are not counted. Raises UserError for a drafter without a shape, for no prompts, and as
    `Decoder` does.
    """
    shaped = require_shaped(drafter)
    shape = shaped.shape
    if not prompts:
        raise UserError("there are no prompts to measure acceptance on")
    counts = np.zeros((2, tree.depth, int(tree.ranks.max()) + 1), dtype=np.int64)
    shaped.shape = FixedTree(tree)
    try:
        decoder = Decoder(
            model,
            drafter,
            eos_token_ids=eos_token_ids,
            gamma=tree.depth,
            rule="exact",
            sampling=sampling,
            observers=[partial(_count, counts, tree)],
        )
        for rows in _batches(len(prompts), batch_size, ranks):
            batch = [prompts[row] for row in rows]
            decoder.decode(batch, max_new_tokens, seed=seed, row_ids=rows)
    finally:
        shaped.shape = shape
    return Acceptance(*sum(ranks.gather(counts), np.zeros_like(counts)))


def _batches(prompts: int, size: int, ranks: Ranks) -> list[Sequence[int]]:
    """The numbers of the prompts that this process decodes, in batches."""
    rows = ranks.share(range(prompts))
    return [rows[begin : begin + size] for begin in range(0, len(rows), size)]


def _count(counts: np.ndarray, tree: Structure, verification: Verification) -> None:
    """Adds what was accepted and judged in one pass to counts, int [2, D, K]: hits and reached."""
    hits, reached = counts
    by_row = (
        verification.drafted,
        verification.accepted,
        verification.path.cpu().numpy(),
        verification.emitted,
    )
    for size, kept, path, emitted in zip(*by_row, strict=True):
        nodes = [-1, *path[:kept].tolist()]
        # If the block was cut, the last emitted token ends the text and nothing follows it.
        for depth in range(min(kept + 1, int(emitted), tree.depth)):
            judged = np.flatnonzero(tree.parents[:size] == nodes[depth])
            reached[depth, tree.ranks[judged]] += 1
            if depth < kept:
                hits[depth, tree.ranks[nodes[depth + 1]]] += 1


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
    acceptance: Acceptance
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
        if busy(self.costs.others):
            text += (
                f". Other processes took {self.costs.others:.0%} of the processor while the costs "
                "were measured: calibrate again on an idle machine"
            )
        return text

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
    settings = DecodeSettings(gamma=max_depth, sampling=sampling)
    # Drafting is timed with a tree too: a level of several nodes costs more than a chain token.
    timed = FixedTree(Structure.of_widths([min(WIDE, width), *[1] * (max_depth - 1)]))
    decoder, _ = settings.decoder(target, drafter.with_shape(timed))
    max_width = (nodes or MAX_NODES) + 1
    shortest = min(prompts, key=len)
    costs = ranks.main_only(
        lambda: measure_costs(
            decoder,
            [shortest],
            max_depth=max_depth,
            max_width=max_width,
            trees=True,
            repeats=CAREFUL_REPEATS,
        )
    )
    tolerance = costs.noise
    if method == "sequoia":
        best, plan = (
            plan_tree(
                acceptance.by_rank(),
                nodes=nodes or MAX_NODES,
                depth=max_depth,
                draft_cost=costs.per_depth,
                draft_fixed=costs.fixed,
                verify_costs=list(zip(costs.widths, costs.v, strict=True)),
                sizes=_sizes(costs, nodes or MAX_NODES),
                tolerance=share,
            )
            for share in (0.0, tolerance)
        )
    elif nodes is not None:
        plan = best = _plan(acceptance.table(), grow_greedily(acceptance.table(), nodes), costs)
    else:
        best, plan = (cheapest(acceptance.table(), costs, tolerance=x) for x in (0.0, tolerance))

    def tokens(what: str, shape: Shape) -> float:
        progress(what)
        settings = DecodeSettings(gamma=plan.structure.depth, sampling=sampling)
        decoder, _ = settings.decoder(target, drafter.with_shape(shape))
        counts = Counts.zero()
        for rows in _batches(len(prompts), 16, ranks):
            batch = [prompts[row] for row in rows]
            counts += decoder.decode(batch, max_new_tokens, seed=seed, row_ids=rows).counts
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
        tolerance,
    )


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
