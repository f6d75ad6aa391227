"""Trees from measured acceptance: what is measured, and that the trees made of it are the best."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from decode.base.errors import UserError
from decode.drafters.lookup.ngram import NgramDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.shapes import SHAPES
from decode.shapes.calibrated import grow_greedily
from decode.shapes.sequoia import plan_tree
from decode.shapes.structure import Structure
from tests.test_loop import NEW, PROMPTS, answers, model
from tests.test_trees import nearly
from train.measure.tree_acceptance import TreeAcceptance, measure_acceptance, probe

Path = tuple[int, ...]


def trees(nodes: int, depth: int, children: int) -> Iterator[list[Path]]:
    """All trees of so many nodes, no deeper, where no rank is left out; the root not counted."""

    def forests(nodes: int, depth: int, first: int) -> Iterator[list[Path]]:
        """Children of one node from rank `first` on, with all below them."""
        if nodes == 0:
            yield []
        elif depth and first < children:
            for own in range(1, nodes + 1):
                for below in forests(own - 1, depth - 1, 0):
                    for rest in forests(nodes - own, depth, first + 1):
                        yield [(first,), *((first, *path) for path in below), *rest]

    yield from forests(nodes, depth, 0)


def test_all_trees_are_tried() -> None:
    # Ordered trees with n edges: the Catalan numbers.
    assert [len(list(trees(n, n, n))) for n in range(6)] == [1, 1, 2, 5, 14, 42]


def worth(paths: list[Path], table: np.ndarray) -> float:
    """Tokens per step: the bonus, and each node's chance of being accepted; table: [D, K]."""
    return 1 + sum(np.prod([table[i, rank] for i, rank in enumerate(path)]) for path in paths)


# --- Medusa's greedy growth -----------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2, 4, 6])
def test_greedy_growth_is_best(nodes: int) -> None:
    """Of all trees, ranks left out too: chances at a depth need not fall with rank."""
    random = np.random.default_rng(nodes)
    for _ in range(3):
        table = random.dirichlet([1.0] * 4, size=3)[:, :3]
        found = grow_greedily(table.tolist(), nodes)
        assert len(found) == nodes
        # The best tree takes ranks in the order of their chances.
        falling = -np.sort(-table, axis=1)
        best = max(worth(paths, falling) for paths in trees(nodes, 3, 3))
        mine = worth(found.paths, table)
        assert mine == pytest.approx(best)


def test_greedy_growth_leaves_out_what_adds_nothing() -> None:
    found = grow_greedily([[0.5, 0.0, 0.25], [0.0, 0.5, 0.0]], 20)
    assert found.paths == [(0,), (2,), (0, 1), (2, 1)]
    # Of equal ones the shallower, then the likelier by rank.
    assert grow_greedily([[0.5, 0.5], [0.5, 0.5]], 3).paths == [(0,), (1,), (0, 0)]


# --- Sequoia --------------------------------------------------------------------------------------


@pytest.mark.parametrize("costs", ["none", "flat", "steep"])
def test_the_programme_finds_the_cheapest_tree(costs: str) -> None:
    random = np.random.default_rng(0)
    draft_cost, slope = {"none": (0.0, 0.0), "flat": (0.1, 0.02), "steep": (0.2, 0.2)}[costs]
    pairs = [[1, 1.0], [8, 1 + 7 * slope]]
    for _ in range(4):
        v = random.dirichlet([2.0, 1.0, 1.0, 1.0])[:3]
        table = np.tile(v, (3, 1))
        plan = plan_tree(v.tolist(), nodes=6, depth=3, draft_cost=draft_cost, verify_costs=pairs)
        cheapest = min(
            (levels * draft_cost + 1 + nodes * slope) / worth(paths, table)
            for nodes, levels in itertools.product(range(1, 7), range(1, 4))
            for paths in trees(nodes, levels, 3)
        )
        assert plan.cost_per_token == pytest.approx(cheapest)
        # And the tree is what the figures say of it.
        tokens = worth(plan.structure.paths, table)
        assert plan.tokens_per_step == pytest.approx(tokens)
        levels, nodes = plan.structure.depth, len(plan.structure)
        cost = (levels * draft_cost + 1 + nodes * slope) / tokens
        assert plan.cost_per_token == pytest.approx(cost)


def test_costs_decide_on_size_and_depth() -> None:
    v = [0.6, 0.2, 0.1]

    def size(**options: Any) -> tuple[int, int]:
        found = plan_tree(v, nodes=40, depth=6, **options).structure
        return len(found), found.depth

    assert size() == (40, 6)
    assert size(draft_cost=0.3)[1] == 3
    assert size(draft_cost=10.0) == (3, 1)  # a fourth child is never accepted
    assert size(verify_costs=[[1, 1.0], [8, 1.1], [9, 4.0], [41, 8.0]])[0] == 7
    dear = plan_tree(v, nodes=40, depth=6, draft_cost=1.0, verify_costs=[[1, 1], [41, 41]])
    assert dear.cost_per_token > 1  # plain decoding is cheaper
    assert plan_tree([0.0], nodes=4, depth=2).structure == Structure([[0]])
    # Only some sizes, and the smallest that costs little more.
    assert size(sizes=[1, 4, 8, 80])[0] == 8
    rising = [[1, 1.0], [41, 3.0]]
    # What each draft costs anyway is shared by more tokens in a larger tree.
    assert size(verify_costs=rising) < size(verify_costs=rising, draft_fixed=2.0)
    best, near = size(verify_costs=rising), size(verify_costs=rising, tolerance=0.05)
    assert near[0] < best[0]
    # More nodes than fit.
    assert len(plan_tree([0.5], nodes=9, depth=2).structure) == 2


# --- measurement ----------------------------------------------------------------------------------


def counted(family: str, tree: Structure, lm: Any, eos: tuple[int, ...]) -> TreeAcceptance:
    """Along the target's own answers, each candidate by a plain forward over its path."""
    hits = np.zeros((tree.depth, int(tree.ranks.max()) + 1), dtype=np.int64)
    reached = hits.copy()
    for prompt, answer in zip(PROMPTS, answers(family, eos), strict=True):
        said = 1
        while said < len(answer):
            path: Path = ()
            for depth in range(min(tree.depth, NEW - said - 1) + 1):
                if said + depth >= len(answer):
                    break
                ranks = [own[-1] for own in tree.paths if own[:-1] == path and len(own) > depth]
                if depth >= min(tree.depth, NEW - said - 1):
                    ranks = []
                reached[depth : depth + 1, ranks] += 1
                ids = torch.tensor([[*prompt, *answer[: said + depth]]])
                with torch.inference_mode():
                    order = lm(ids).logits[0, -1].argsort(descending=True).tolist()
                rank = order.index(answer[said + depth])
                if rank not in ranks:
                    break
                hits[depth, rank] += 1
                path = (*path, rank)
            said += len(path) + 1
    return TreeAcceptance(hits, reached)


@pytest.mark.parametrize("tree", [probe(3, 3), Structure([[0], [1], [0, 2], [1, 0], [1, 1]])])
def test_what_is_measured(tree: Structure) -> None:
    family = "qwen2"
    lm = nearly(family)
    drafter = SmallLMDrafter(lm)
    before = drafter.shape
    for eos in ((), (answers(family)[0][12],)):
        found = measure_acceptance(
            model(family),
            drafter,
            PROMPTS,
            tree=tree,
            max_new_tokens=NEW,
            eos_token_ids=eos,
            batch_size=3,
        )
        expected = counted(family, tree, lm, eos)
        assert found.hits.tolist() == expected.hits.tolist()
        assert found.reached.tolist() == expected.reached.tolist()
        assert found.hits.sum() > 20
    assert drafter.shape is before


def test_a_measured_tree_is_better_than_a_chain() -> None:
    """The whole way: measure, grow, decode with as many nodes."""
    sampling = Sampling(0.8, top_k=20)
    drafter = SmallLMDrafter(nearly("llama"))
    found = measure_acceptance(
        model("llama"), drafter, PROMPTS, tree=probe(4, 3), sampling=sampling, max_new_tokens=100
    )
    table = found.table()
    assert all(0 < sum(row) <= 1 for row in table)
    figures = {}
    for name, options in (
        ("static", {"widths": [1] * 6}),
        ("calibrated", {"table": table, "nodes": 6}),
        ("sequoia", {"acceptance": found.by_rank(), "nodes": 6, "depth": 6, "draw": "top"}),
    ):
        shape = SHAPES[name](**options)
        assert shape.max_nodes(6) == 6
        run = Decoder(
            model("llama"),
            SmallLMDrafter(nearly("llama"), shape=shape),
            gamma=6,
            rule="exact",
            sampling=sampling,
        ).decode(PROMPTS, 100)
        figures[name] = run.counts.tokens_per_step
    assert figures["calibrated"] > 1.1 * figures["static"]
    assert figures["sequoia"] > 1.1 * figures["static"]


def test_measuring_the_impossible_is_refused() -> None:
    with pytest.raises(UserError, match="NgramDrafter does not take a shape"):
        measure_acceptance(model("llama"), NgramDrafter(), PROMPTS, tree=probe(2, 2))
    drafter = SmallLMDrafter(model("llama"))
    with pytest.raises(UserError, match="no prompts to measure"):
        measure_acceptance(model("llama"), drafter, [], tree=probe(2, 2))
    with pytest.raises(UserError, match="width is 0"):
        probe(0, 2)
