"""Shapes by themselves: the nodes they draft, the q they declare, and that lossless rules stay so.

Shapes: B rows, N nodes, V vocabulary. A path is the tokens from the root's child to a node.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from decode.base.errors import UserError
from decode.draft import Draft, Limits, Siblings
from decode.drafters.draft_vocabulary import reduce_output
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.shapes import SHAPES, Growth, Shape
from decode.shapes.structure import Structure
from decode.tree_nodes import best, first_equal, pack, renumbered
from decode.tree_structure import grown_ancestors
from tests.test_drafters import append, contexts_of, limits_of, model, noise_for
from tests.tiny import after, moved, tiny_model

GREEDY = Sampling()
Path = tuple[int, ...]

# One of each kind, at most 3 deep.
OPTIONS: dict[str, dict[str, Any]] = {
    "static": {"paths": [[0], [2], [0, 1], [0, 3], [2, 0], [0, 1, 0], [2, 0, 1]]},
    "chains": {"chains": 3, "budget": 7},
    "dynamic": {"width": 3, "nodes": 8},
    "calibrated": {"table": [[0.5, 0.2, 0.1]] * 3, "nodes": 8},
    "sequoia": {"acceptance": [0.6, 0.2, 0.1], "nodes": 8, "depth": 3},
}
NAMES = tuple(OPTIONS)


def shape(name: str, **more: Any) -> Shape:
    return SHAPES[name](**(OPTIONS[name] | more))


def paths_of(draft: Draft, row: int) -> list[Path]:
    """The path of each of a row's nodes."""
    paths: list[Path] = []
    parents = draft.parent_rows()[row] - 1
    for node in range(int(draft.sizes[row])):
        above = int(parents[node])
        assert above < node
        paths.append((*(paths[above] if above >= 0 else ()), int(draft.tokens[row, node])))
    return paths


class TableGrowth(Growth):
    """A drafter that says of each path what `table(row, path)` says: logits, [V]."""

    def __init__(
        self, rows: int, size: int, table: Callable[[int, Path], np.ndarray], sampling: Sampling
    ) -> None:
        contexts = contexts_of([[0]] * rows)
        super().__init__(contexts, sampling, torch.device("cpu"), size)
        self.table = table

    def _first(self) -> Tensor:
        return self._logits([[()]] * self.rows)[:, 0]

    def _extend(self, count: int) -> Tensor:
        assert self.ancestors is not None
        seen = self.ancestors[:, -count:].numpy()
        fed = self.fed.numpy()
        return self._logits(
            [[tuple(fed[row][path].tolist()) for path in seen[row]] for row in range(self.rows)]
        )

    def _logits(self, paths: list[list[Path]]) -> Tensor:
        table = [[self.table(row, path) for path in paths[row]] for row in range(self.rows)]
        return torch.as_tensor(np.array(table), dtype=torch.float32)


def random_table(size: int, seed: int = 0) -> Callable[[int, Path], np.ndarray]:
    def table(row: int, path: Path) -> np.ndarray:
        return 2 * np.random.default_rng([seed, row, *path, len(path)]).normal(size=size)

    return table


def grow(
    shape: Shape,
    table: Callable[[int, Path], np.ndarray],
    depths: list[int],
    *,
    size: int = 9,
    sampling: Sampling = GREEDY,
    rng: CounterRNG | None = None,
) -> Draft:
    growth = TableGrowth(len(depths), size, table, sampling)
    rng = rng or noise_for(len(depths))
    draft = shape.grow(growth, Limits(np.array(depths)), sampling, rng)
    assert draft.tokens.shape[1] <= shape.max_nodes(max(depths))
    assert growth.fed.shape[1] <= shape.max_nodes(max(depths))
    return draft


# --- trees ----------------------------------------------------------------------------------------


def random_trees(rows: int, nodes: int, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and parents of random trees, shallow nodes first."""
    random = np.random.default_rng(seed)
    # Any node before it is a node's parent; where parents are sorted, so are depths.
    parents = np.sort(random.integers(-1, np.arange(nodes), (rows, nodes)), axis=1)
    return torch.as_tensor(random.integers(0, tokens, (rows, nodes))), torch.as_tensor(parents)


def test_equal_paths_become_one() -> None:
    tokens, parents = random_trees(50, 12, 2, seed=0)
    draft = Draft(tokens, np.full(50, 12), parents=parents)
    depth = draft.nodes_by_depth().shape[1]
    first = first_equal(tokens, parents, depth)
    moved = Draft(tokens, draft.sizes, parents=renumbered(parents, first))
    equal = 0
    for row in range(50):
        paths = paths_of(draft, row)
        assert first[row].tolist() == [paths.index(path) for path in paths]
        assert paths_of(moved, row) == paths
        equal += sum(place != node for node, place in enumerate(first[row].tolist()))
    assert equal > 50
    # What stands twice has no children left, so it can be taken out.
    alone = pack(first == torch.arange(12), moved.parents).draft(tokens)
    for row in range(50):
        assert paths_of(alone, row) == list(dict.fromkeys(paths_of(draft, row)))


def test_the_best_nodes_have_their_parents() -> None:
    random = torch.Generator().manual_seed(0)
    tokens, parents = random_trees(50, 12, 5, seed=1)
    draft = Draft(tokens, np.full(50, 12), parents=parents)
    # Many nodes with q = 1 tie with their parents.
    own = torch.randint(-2, 1, (50, 12), generator=random).float().masked_fill(tokens == 4, -np.inf)
    scores = (draft.ancestors() * own[:, None, :].nan_to_num(neginf=-1e9)).sum(2)
    scores = scores.masked_fill(scores < -1e8, -torch.inf)
    allowed = draft.ancestors().sum(2) <= 3
    keep = best(scores, allowed, 5)
    for row in range(50):
        kept = keep[row].nonzero()[:, 0].tolist()
        usable = (allowed[row] & (scores[row] > -torch.inf)).nonzero()[:, 0].tolist()
        assert len(kept) == min(5, len(usable))
        assert all(int(parents[row, node]) in [-1, *kept] for node in kept)
        left = set(usable) - set(kept)
        assert not left or max(scores[row, list(left)]) <= min(scores[row, kept])


# --- structures -----------------------------------------------------------------------------------


def test_a_structure_stands_in_order() -> None:
    structure = Structure([[2, 0], [0, 3], [2], [0], [0, 3, 1]])
    assert structure.paths == [(0,), (2,), (0, 3), (2, 0), (0, 3, 1)]
    assert structure.parents.tolist() == [-1, -1, 0, 1, 2]
    assert structure.ranks.tolist() == [0, 2, 3, 0, 1]
    assert structure.orders.tolist() == [0, 1, 0, 0, 0]
    assert [structure.within(depth) for depth in range(5)] == [0, 2, 4, 5, 5]
    draft = Draft(
        torch.zeros(1, 5, dtype=torch.int64),
        np.array([5]),
        parents=torch.as_tensor(structure.parents)[None],
    )
    assert np.array_equal(structure.ancestors(), draft.ancestors()[0].numpy())
    assert Structure.of_widths([2, 3, 1]).depths.tolist() == [1] * 2 + [2] * 6 + [3] * 6


@pytest.mark.parametrize("depth", [2, 3])
def test_a_plan_knows_the_ancestors_of_the_nodes_that_are_fed(depth: int) -> None:
    paths = [[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 1, 0], [2, 0, 0], [0, 1, 0, 0]]
    static: Any = SHAPES["static"](paths=paths)
    grown = None
    for level in static._plan(depth, 2, torch.device("cpu")).levels[:-1]:
        grown = grown_ancestors(grown, level.fed_parents)
        assert torch.equal(level.fed_ancestors, grown)
    assert grown is not None
    assert len(grown[0]) == 2 * (depth - 1)


def test_a_structure_is_stored(tmp_path: Any) -> None:
    structure = Structure([[0], [0, 2], [1]])
    structure.save(tmp_path / "tree.json", {"prompts": 3})
    assert Structure.load(tmp_path / "tree.json") == structure
    static: Any = SHAPES["static"](file=str(tmp_path / "tree.json"))
    assert static.structure == structure
    for text in (
        "",
        "[]",
        '{"format": 1}',
        '{"format": 1, "paths": [[0, 1]]}',
        '{"format": 2, "paths": []}',
    ):
        (tmp_path / "bad.json").write_text(text, "utf-8")
        with pytest.raises(UserError, match=r"not a tree|without its parent|has format 2"):
            Structure.load(tmp_path / "bad.json")
    with pytest.raises(UserError, match="not a tree structure"):
        Structure.load(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("static", {}, "given by nothing; expected exactly one of"),
        ("static", {"paths": [[0]], "widths": [1]}, "paths and widths"),
        ("static", {"paths": []}, "no nodes"),
        ("static", {"paths": 3}, "paths are 3"),
        ("static", {"paths": [[0], [-1]]}, r"the path \[-1\]"),
        ("static", {"paths": [[0], ["a"]]}, r"the path \['a'\]"),
        ("static", {"paths": [[0], [0]]}, r"the path \[0\] twice"),
        ("static", {"paths": [[0], [1, 0]]}, r"\[1, 0\] without its parent \[1\]"),
        ("static", {"widths": [2, 0]}, r"tree widths \[2, 0\]"),
        ("static", {"widths": [2], "draw": "best"}, "draw is 'best'; expected one of top, dis"),
        ("chains", {"chains": 0}, "chains is 0"),
        ("chains", {"chains": 2, "budget": 0}, "budget is 0"),
        ("dynamic", {"width": 0}, "width is 0"),
        ("dynamic", {"nodes": 2.5}, "nodes is 2.5"),
        ("calibrated", {"table": [0.5, 0.2], "nodes": 3}, r"shape \[2\]; expected \[D, K\]"),
        ("calibrated", {"table": [[0.5, 0.6]], "nodes": 3}, "sum to at most 1"),
        ("calibrated", {"table": [[0.5, float("nan")]], "nodes": 3}, "probabilities"),
        ("calibrated", {"table": [[0.0, 0.0], [0.5, 0.5]], "nodes": 3}, "is 0 for all first"),
        ("sequoia", {"acceptance": []}, r"acceptance by child is \[\]"),
        ("sequoia", {"acceptance": [0.7, 0.7]}, "sum to at most 1"),
        ("sequoia", {"acceptance": [0.7], "depth": 0}, "depth is 0"),
        ("sequoia", {"acceptance": [0.7], "draft_cost": -1.0}, "draft_cost is -1"),
        ("sequoia", {"acceptance": [0.7], "verify_costs": [[1, 1], [1, 2]]}, "widths ascending"),
    ],
)
def test_bad_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SHAPES[name](**options)


@pytest.mark.parametrize("name", ["static", "dynamic", "chains"])
def test_a_tree_wider_than_the_vocabulary_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"has \d children, but the .* vocabulary has only 2"):
        grow(shape(name), random_table(2), [3], size=2)


def test_a_tree_deeper_than_the_context_is_refused() -> None:
    small = tiny_model("llama", max_positions=3)
    with pytest.raises(UserError, match=r"a tree 3 deep does not fit .* LlamaForCausalLM"):
        SmallLMDrafter(small, shape=shape("static"))
    drafter = SmallLMDrafter(model("llama"), shape=shape("dynamic"))
    with pytest.raises(UserError, match=r"drafts of depth 256 do not fit into .* 256 tokens"):
        Decoder(model("llama"), drafter, gamma=256, rule="exact")


# --- what is drafted ------------------------------------------------------------------------------

DEPTHS = [3, 0, 1, 2, 3]


def ranked(logits: np.ndarray) -> list[int]:
    return np.argsort(-logits.astype(np.float32), kind="stable").tolist()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return np.asarray(logits - np.log(np.exp(logits).sum()))


def path_score(table: Callable[[int, Path], np.ndarray], row: int, path: Path) -> float:
    return float(sum(log_softmax(table(row, path[:i]))[path[i]] for i in range(len(path))))


@pytest.mark.parametrize("name", ["static", "calibrated", "sequoia"])
def test_fixed_trees_hold_the_likeliest_tokens(name: str) -> None:
    table = random_table(9)
    fixed: Any = shape(name)
    draft = grow(fixed, table, DEPTHS)
    assert draft.q is None
    for row, depth in enumerate(DEPTHS):
        expected = []
        for ranks in fixed.structure.paths[: fixed.structure.within(depth)]:
            path: Path = ()
            for rank in ranks:
                path = (*path, ranked(table(row, path))[rank])
            expected.append(path)
        assert paths_of(draft, row) == expected


def test_dynamic_trees_expand_and_rerank() -> None:
    """EAGLE-2 over again, a row at a time, from its description."""
    width, nodes = OPTIONS["dynamic"]["width"], OPTIONS["dynamic"]["nodes"]
    for seed in range(5):
        table = random_table(9, seed)
        draft = grow(shape("dynamic"), table, DEPTHS)
        assert draft.q is None
        for row, depth in enumerate(DEPTHS):
            layer: list[Path] = [()]
            candidates: list[Path] = []
            for _ in range(depth):
                layer = [
                    (*path, token) for path in layer for token in ranked(table(row, path))[:width]
                ]
                candidates += layer
                layer = sorted(layer, key=lambda path: -path_score(table, row, path))[:width]
            candidates.sort(key=lambda path: -path_score(table, row, path))
            found = paths_of(draft, row)
            assert set(found) == set(candidates[:nodes])
            assert len(found) == min(nodes, len(candidates))
            assert [len(path) for path in found] == sorted(len(path) for path in found)


def test_greedy_chains_keep_the_likeliest_paths() -> None:
    table = random_table(9)
    for budget in (None, 7, 1):
        draft = grow(SHAPES["chains"](chains=3, budget=budget), table, DEPTHS)
        assert draft.q is None
        for row, depth in enumerate(DEPTHS):
            paths: list[Path] = []
            for token in ranked(table(row, ()))[:3]:
                chain: Path = (token,)
                while len(chain) <= depth:
                    paths.append(chain)
                    chain = (*chain, ranked(table(row, chain))[0])
            paths.sort(key=lambda path: -path_score(table, row, path))
            assert set(paths_of(draft, row)) == set(paths[:budget])


DRAWN = {
    "static": {"draw": "independent"},
    "static without replacement": {"draw": "distinct"},
    "chains": {},
    "calibrated": {"draw": "independent"},
    "sequoia": {},  # without replacement, as in the paper
}


def drawn(name: str) -> Shape:
    return shape(name.split()[0], **DRAWN[name])


@pytest.mark.parametrize("name", DRAWN)
def test_q_is_that_of_the_path(name: str) -> None:
    """Each node's row of q is what the drafter says after the path above it."""
    sampling = Sampling(0.7, top_k=5, top_p=0.9)
    table = random_table(9)
    draft = grow(drawn(name), table, DEPTHS, sampling=sampling)
    assert draft.q is not None
    assert draft.siblings == drawn(name).siblings(sampling)
    rows_of_q = draft.rows_of_q()
    for row, depth in enumerate(DEPTHS):
        paths = paths_of(draft, row)
        assert max(map(len, paths), default=0) <= depth
        assert bool(paths) == (depth > 0)
        for node, path in enumerate(paths):
            logits = torch.as_tensor(table(row, path[:-1]), dtype=torch.float32)
            q = draft.q[row, rows_of_q[row, node]]
            torch.testing.assert_close(q, sampling.probs(logits))
            assert q[path[-1]] > 0
        if draft.siblings == "distinct":
            assert len(set(paths)) == len(paths)


@pytest.mark.parametrize("draw", ["distinct", "independent"])
def test_children_that_q_has_no_token_for(draw: str) -> None:
    """Of two tokens no third is drawn without replacement; nor what would follow it."""
    only: Any = SHAPES["static"](widths=[3, 2], draw=draw)
    draft = grow(only, random_table(9), [2, 1, 2], sampling=Sampling(1.0, top_k=2))
    if draw == "independent":
        assert draft.sizes.tolist() == [9, 3, 9]
        return
    assert draft.sizes.tolist() == [6, 2, 6]
    for row in range(3):
        paths = paths_of(draft, row)
        assert len(set(paths)) == len(paths)
    assert draft.q is not None
    one = grow(only, random_table(9), [2, 0], sampling=Sampling(1.0, top_k=1))
    assert one.sizes.tolist() == [2, 0]


# --- a drafter's draft does not depend on the rows beside it --------------------------------------


@pytest.mark.parametrize("name", [*DRAWN, "dynamic"])
def test_rows_do_not_depend_on_each_other(name: str) -> None:
    def which() -> Shape:
        return shape(name) if name == "dynamic" else drawn(name)

    sampling = GREEDY if name == "dynamic" else Sampling(1.0, top_k=4)
    together = grow(which(), random_table(9), DEPTHS, sampling=sampling)
    for row, depth in enumerate(DEPTHS):
        if not depth:
            continue

        def table(_: int, path: Path, row: int = row) -> np.ndarray:
            return random_table(9)(row, path)

        rng = CounterRNG(0, torch.tensor([row]))
        alone = grow(which(), table, [depth], sampling=sampling, rng=rng)
        assert paths_of(alone, 0) == paths_of(together, row)


# --- a small LM's logits are those of a plain forward over each path ------------------------------


class Checking(Shape):
    """Another shape, with each of the drafter's answers compared with a plain forward."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.checked, self.depth = shape, 0, shape.depth

    def siblings(self, sampling: Sampling) -> Siblings:
        return self.shape.siblings(sampling)

    def max_nodes(self, gamma: int) -> int:
        return self.shape.max_nodes(gamma)

    def grow(self, growth: Growth, limits: Limits, sampling: Sampling, rng: CounterRNG) -> Draft:
        checked: Any = growth
        first, extend = growth.first, growth.extend

        def checked_first() -> Tensor:
            logits = first()
            self._check(growth, limits, sampling, logits[:, None], None)
            return logits

        def checked_extend(tokens: Tensor, *tree: Tensor) -> Tensor:
            logits = extend(tokens, *tree)
            seen = growth.on_path(tokens.shape[1])
            self._check(growth, limits, sampling, logits, seen)
            return logits

        checked.first, checked.extend = checked_first, checked_extend
        return self.shape.grow(growth, limits, sampling, rng)

    def _check(
        self, growth: Any, limits: Limits, sampling: Sampling, logits: Tensor, seen: Tensor | None
    ) -> None:
        lm, ids = growth.drafter.lm.model, growth.vocabulary
        penalty = transformers.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
        for row, depth in enumerate(limits.depths):
            # A text that outgrows the drafter's context is read from here on.
            begin = growth.drafter._begin[row]
            text = growth.contexts.tokens[row, begin : growth.contexts.lengths[row]].tolist()
            paths = [[]] if seen is None else [growth.fed[row, own].tolist() for own in seen[row]]
            # What hangs on a node at the limit is not asked for.
            nodes = [node for node, path in enumerate(paths) if len(path) < depth]
            if not nodes:
                continue
            texts = torch.tensor([text + paths[node] for node in nodes])
            with torch.inference_mode():
                expected = lm(texts).logits[:, -1]
            if ids is not None:
                whole = torch.zeros(len(nodes), growth.vocab_size)
                whole[:, ids] = expected
                expected = whole
            if sampling.repetition_penalty != 1:
                expected = penalty(texts, expected)
            if ids is not None:
                expected = expected[:, ids]
            # The same sums in float32, in another order.
            torch.testing.assert_close(logits[row, nodes], expected, rtol=1e-3, atol=1e-4)
            self.checked += len(nodes)


TEXTS = [[5, 17, 250, 9, 42], [7], [30] * 9]


@pytest.mark.parametrize(
    ("family", "name", "penalty"),
    [
        ("llama", "chain", 1.0),
        ("gpt2", "static", 1.3),
        ("llama", "chains", 1.3),
        ("gemma", "dynamic", 1.0),
        ("llama", "sequoia", 1.0),
    ],
)
def test_logits_are_those_of_each_path(family: str, name: str, penalty: float) -> None:
    """In the loop, after whatever was accepted or rejected, in rows of different lengths."""
    temperature = 1.0 if name in ("chain", "chains", "sequoia") else 0.0
    checking = Checking(SHAPES["chain"]() if name == "chain" else shape(name))
    drafter = SmallLMDrafter(model(family, seed=3), shape=checking)
    sampling = Sampling(temperature, repetition_penalty=penalty)
    # It accepts often what it drafts itself, with a little noise.
    target = moved(tiny_model(family, seed=3), 0.02)
    run = Decoder(target, drafter, gamma=3, rule="exact", sampling=sampling).decode(TEXTS, 12)
    assert checking.checked > 30
    assert (run.counts.by_accepted > 0).sum() >= 2


@pytest.mark.parametrize("name", ["dynamic", "sequoia"])
def test_trees_over_a_reduced_vocabulary(name: str) -> None:
    lm = tiny_model("llama", layers=1, seed=7)
    ids = torch.arange(4, 300, 3)
    reduce_output(lm, ids)
    for sampling in (GREEDY, Sampling(0.8, top_k=40, repetition_penalty=1.2)):
        checking = Checking(shape(name))
        drafter = SmallLMDrafter(lm.requires_grad_(False), ids, checking)
        contexts = contexts_of(TEXTS)
        drafter.start(contexts)
        draft = drafter.draft(contexts, limits_of(contexts, 3), sampling, noise_for(3))
        assert checking.checked >= 9
        assert set(draft.tokens.flatten().tolist()) <= set(ids.tolist())
        if draft.q is not None:
            assert draft.q.shape[2] == 300
            assert set(draft.q.nonzero()[:, 2].tolist()) <= set(ids.tolist())


def test_a_row_that_was_left_out_catches_up() -> None:
    """A row with nothing to draft lacks more than those beside it feed; it is not forgotten."""
    checking = Checking(shape("static"))
    drafter = SmallLMDrafter(model("llama"), shape=checking)
    contexts = contexts_of(TEXTS)
    drafter.start(contexts)
    for depths in ([3, 3, 3], [3, 0, 3], [3, 0, 0], [0, 0, 0], [1, 3, 0], [3, 3, 3]):
        drafter.draft(contexts, Limits(np.array(depths)), GREEDY, noise_for(3))
        append(contexts, [[8, 9, 10], [11, 12], [13]])
        drafter.observe(after(contexts))
    assert checking.checked > 50


def test_trees_up_to_the_end_of_the_context() -> None:
    """Nodes take slots but no room in the text: only depth counts, for each row by itself."""
    checking = Checking(shape("dynamic", nodes=50))
    drafter = SmallLMDrafter(
        tiny_model("mistral", layers=1, seed=7, max_positions=12), shape=checking
    )
    contexts = contexts_of([[5] * 8, [7]])
    drafter.start(contexts)
    depths = []
    for _ in range(13):
        draft = drafter.draft(contexts, limits_of(contexts, 3), GREEDY, noise_for(2))
        depths.append((draft.nodes_by_depth() > 0).sum(1).tolist())
        append(contexts, [[9], [9]])
        drafter.observe(after(contexts))
    max_depth = min(3, int(draft_depth := max(depth for depth, _ in depths)))
    assert draft_depth == max_depth
    # Past the end too: the drafter then reads the last part of the text.
    assert depths == [[max_depth, max_depth]] * 13
