"""Chooses the tree that a drafter drafts in, by acceptance and costs measured on dev prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from decode.costs import Costs
from decode.drafters import Drafter
from decode.errors import UserError
from decode.kv import require_trees
from decode.measure_costs import measure_costs
from decode.measure_tree import Acceptance, measure_acceptance, probe, require_shaped
from decode.sampling import Sampling
from decode.settings import DecodeSettings
from decode.shapes import Shape
from decode.shapes.calibrated import grow_greedily
from decode.shapes.chain import Chain
from decode.shapes.sequoia import Plan, plan_tree
from decode.shapes.static import FixedTree
from decode.shapes.structure import Structure
from decode.stats import Counts
from decode.target import Target

Method = Literal["calibrated", "sequoia"]
Progress = Callable[[str], None]  # what is done next
MOST_NODES = 64
WIDE = 3  # nodes on each level of the tree that drafting is timed with


class NothingAccepted(UserError):
    """The target took none of the drafter's first tokens, so there is nothing to plan with."""


@dataclass(frozen=True)
class TreeCalibration:
    """A tree and what it was chosen by.

    plan: with the tokens per step and the cost per token that the acceptance and the costs
    promise. tree_tokens, chain_tokens: tokens per step that the loop really emitted on the same
    prompts, with the tree, and with chains as deep.
    """

    method: Method
    plan: Plan
    acceptance: Acceptance
    costs: Costs
    tree_tokens: float
    chain_tokens: float
    prompts: int
    temperature: float

    @property
    def structure(self) -> Structure:
        return self.plan.structure

    @property
    def verdict(self) -> str:
        tree = self.structure
        speed = 1 / self.plan.cost_per_token
        found = (
            f"{len(tree)} nodes, {tree.depth} deep: {self.tree_tokens:.2f} tokens per step on "
            f"these prompts (promised: {self.plan.tokens_per_step:.2f}; chains {tree.depth} deep: "
            f"{self.chain_tokens:.2f}); at the measured costs {speed:.2f} times plain decoding"
        )
        return found if speed > 1 else f"{found}: drafting does not pay on this machine"

    def to_dict(self) -> dict[str, Any]:
        """As JSON values: everything but the paths, which the tree's file has."""
        return {
            "method": self.method,
            "nodes": len(self.structure),
            "depth": self.structure.depth,
            "promised_tokens_per_step": self.plan.tokens_per_step,
            "promised_cost_per_token": self.plan.cost_per_token,
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
    progress: Progress = lambda what: None,
) -> TreeCalibration:
    """A tree of the `width` likeliest tokens at most, and at most `depth` deep, for any drafter
    that drafts in shapes; from prompts (token ids) of the dev split.

    method: `calibrated` grows it by the acceptance of each rank at each depth (2401.10774, section
    2.3.3), to `nodes` nodes, or where None to as many as are cheapest per token at the measured
    costs. `sequoia` plans by the acceptance of each rank, at all depths together, and the costs
    (2402.12374, section 3.1), at most `nodes` (None: 64).

    Raises UserError for a drafter without a shape, a target that cannot verify trees, no prompts,
    an unknown method, where no draft was right, and as `measure_costs` and `Decoder` do.
    """
    if method not in get_args(Method):
        raise UserError(f"method is {method!r}; expected one of {', '.join(get_args(Method))}")
    require_shaped(drafter)
    require_trees(target.model)
    sampling = sampling or Sampling()
    deepest = drafter.with_shape(Chain()).most_nodes(depth)
    progress("acceptance")
    found = measure_acceptance(
        target.model,
        drafter,
        prompts,
        tree=probe(width, deepest),
        max_new_tokens=max_new_tokens,
        eos_token_ids=target.eos_token_ids,
        sampling=sampling,
        seed=seed,
    )
    if not found.hits[0].any():
        raise NothingAccepted(
            f"not one of the {width} likeliest first tokens was the target's in "
            f"{int(found.reached[0, 0])} drafts, so no tree can be made; train the drafter more."
        )
    progress("costs")
    settings = DecodeSettings(gamma=deepest, sampling=sampling)
    # Drafting is timed in a tree too: a level of several nodes costs more than a link of a chain.
    usual = FixedTree(Structure.of_widths([min(WIDE, width), *[1] * (deepest - 1)]))
    decoder, _ = settings.decoder(target, drafter.with_shape(usual))
    widest = (nodes or MOST_NODES) + 1
    shortest = min(prompts, key=len)
    costs = measure_costs(decoder, [shortest], most=deepest, widest=widest, trees=True)
    if method == "sequoia":
        plan = plan_tree(
            found.by_rank(),
            nodes=nodes or MOST_NODES,
            depth=deepest,
            draft_cost=costs.c,
            verify_costs=list(zip(costs.widths, costs.v, strict=True)),
        )
    elif nodes is not None:
        plan = _plan(found.table(), grow_greedily(found.table(), nodes), costs)
    else:
        plan = cheapest(found.table(), costs)

    def tokens(what: str, shape: Shape) -> float:
        progress(what)
        settings = DecodeSettings(gamma=plan.structure.depth, sampling=sampling)
        decoder, _ = settings.decoder(target, drafter.with_shape(shape))
        counts = Counts.zero()
        for begin in range(0, len(prompts), 16):
            batch = prompts[begin : begin + 16]
            rows = range(begin, begin + len(batch))
            counts += decoder.decode(batch, max_new_tokens, seed=seed, row_ids=rows).counts
        return counts.tokens_per_step

    return TreeCalibration(
        method,
        plan,
        found,
        costs,
        tokens("the tree", FixedTree(plan.structure)),
        tokens("chains", Chain()),
        len(prompts),
        sampling.temperature,
    )


def cheapest(table: Sequence[Sequence[float]], costs: Costs, most: int = MOST_NODES) -> Plan:
    """Of the trees of 1 … `most` nodes that `grow_greedily` makes of a table of acceptance [D, K]
    the one whose tokens cost least; of equal ones the smallest.

    >>> costs = Costs(0.05, 1, 0.1, (1, 2, 3, 4), (1.0, 1.0, 1.0, 2.0))
    >>> cheapest([[0.5, 0.3], [0.4, 0.2]], costs).structure.paths
    [(0,), (1,)]
    """
    plans = [_plan(table, grow_greedily(table, nodes), costs) for nodes in range(1, most + 1)]
    return min(plans, key=lambda plan: plan.cost_per_token)


def _plan(table: Sequence[Sequence[float]], tree: Structure, costs: Costs) -> Plan:
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for path in tree.paths:  # shallow ones first
        chances[path] = chances[path[:-1]] * table[len(path) - 1][path[-1]]
    tokens = sum(chances.values())
    cost = tree.depth * costs.c + float(costs.verify(len(tree) + 1))
    return Plan(tree, tokens, cost / tokens)
