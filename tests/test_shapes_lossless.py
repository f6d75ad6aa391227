"""Drawn trees and a rule that judges them, by enumeration: the text has the target's distribution.

Distributions are multiples of 1/4, so a grid of uniforms draws each tree exactly as often as it is
likely. What a rule makes of each is enumerated too: nothing is left to chance. `test_rules` has the
rules alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decode.base.errors import UserError
from decode.draft import Contexts, Draft, Limits, Siblings
from decode.drafters import Drafter
from decode.drafters.lookup.ngram import NgramDrafter
from decode.drafters.several.combined import CompositeDrafter, SeveralDrafters
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.mixed_sampling import MixedSampling
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.loop.step import decided
from decode.rules import RULES
from decode.rules.exact import ExactMatch
from decode.shapes import SHAPES, Growth, Shape
from decode.tree_nodes import first_equal, leave_out, pack
from decode.verdict import Decision, Scores
from tests.enumeration import TOKENS, Contextual, drawing_by_cdf, enumerate_drafts, total_variation
from tests.lossless import FixedDraft, Priced
from tests.test_drafters import contexts_of, limits_of, model, noise_for
from tests.test_shapes import Path, paths_of

PLAIN = Sampling(1.0)
PAIRS = 6


class GridNoise(CounterRNG):
    """Uniforms of drafting, [B, n], set by hand; parts of a drafter have some each (0: they are
    all for the one part that draws)."""

    def __init__(self, grid: np.ndarray, each: int = 0) -> None:
        self.grid, self.each = grid, each

    def uniforms(self, stream: int, first: int, count: int) -> Tensor:
        assert stream == CounterRNG.DRAFT
        assert first + count <= self.grid.shape[1]
        return torch.as_tensor(self.grid[:, first : first + count])

    def fork(self, part: int) -> CounterRNG:
        places = slice(part * self.each, (part + 1) * self.each) if self.each else slice(None)
        return GridNoise(self.grid[:, places])


def grid(parts: int, uniforms: int) -> np.ndarray:
    """float64 [parts ** uniforms, uniforms]: the middles of equal parts, in all combinations."""
    middles = (np.arange(parts) + 0.5) / parts
    axes = np.meshgrid(*[middles] * uniforms, indexing="ij")
    return np.stack(axes, -1).reshape(-1, uniforms)


class TableGrowth(Growth):
    """A drafter that says q of each path, the same in all of many rows."""

    def __init__(self, contexts: Contexts, q: Contextual, sampling: Sampling) -> None:
        super().__init__(contexts, sampling, torch.device("cpu"), TOKENS)
        self.q = q

    def _first(self) -> Tensor:
        return self._logits([()]).expand(self.rows, -1)

    def _extend(self, count: int) -> Tensor:
        fed = self.fed[:, None].expand(-1, count, -1)
        if self.ancestors is not None:
            fed = torch.where(self.ancestors[:, -count:], fed, -1)
        paths, which = np.unique(fed.flatten(0, 1).numpy(), axis=0, return_inverse=True)
        logits = self._logits([tuple(path[path >= 0].tolist()) for path in paths])
        return logits[torch.as_tensor(which)].unflatten(0, (self.rows, count))

    def _logits(self, paths: list[Path]) -> Tensor:
        with np.errstate(divide="ignore"):
            table = np.log([self.q(*path) for path in paths])
        return torch.as_tensor(table, dtype=torch.float32)


class TableDrafter(Drafter):
    """Says q of each path, in some shape."""

    def __init__(self, q: Contextual, shape: Shape) -> None:
        self.q, self.shape = q, shape

    def siblings(self, sampling: Sampling) -> Siblings:
        return self.shape.siblings(sampling)

    def start(self, contexts: Contexts) -> None:
        return None

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        return self.shape.grow(TableGrowth(contexts, self.q, sampling), limits, sampling, rng)


def different(draft: Draft) -> tuple[Draft, np.ndarray]:
    """Each different tree of a draft once, and its share of the rows, [M]."""
    assert draft.q is not None
    parents, q_rows = draft.parent_rows() - 1, draft.rows_of_q()
    q = draft.q.gather(1, q_rows[..., None].expand(-1, -1, TOKENS))
    nodes = torch.cat([parents[..., None], draft.tokens[..., None], q], 2)
    nodes = torch.where(draft.valid()[..., None], nodes, 0).flatten(1).numpy()
    _, rows, counts = np.unique(nodes, axis=0, return_index=True, return_counts=True)
    at = torch.as_tensor(rows)
    found = Draft(
        draft.tokens[at], draft.sizes[rows], draft.q[at], parents[at], q_rows[at], draft.drawn
    )
    return found, counts / len(draft.sizes)


def apart(rule: str, p: Contextual, draft: Draft) -> float:
    """The total variation between the target and what a rule makes of these drafts."""
    found = enumerate_drafts(RULES[rule](), p, *different(draft))
    return total_variation(found.joint, p.joint())


def drafts_of(drafter: Drafter, rng: GridNoise, **limits: Any) -> Draft:
    """A grid of uniforms draws each token exactly as often as it is likely."""
    contexts = contexts_of([[0]] * len(rng.grid))
    drafter.start(contexts)
    with drawing_by_cdf():
        return drafter.draft(contexts, replace(limits_of(contexts, 2), **limits), PLAIN, rng)


# (shape, options, parts of the grid, how many draws). Without replacement a second draw is from
# multiples of 1/2, 1/3 or 1/4, which twelfths hold all.
DRAWN = [
    ("static", {"widths": [2, 2], "draw": "independent"}, 4, 6),
    ("static", {"paths": [[0], [1], [2], [1, 0]], "draw": "distinct"}, 12, 4),
    ("static", {"widths": [2, 1], "draw": "distinct"}, 12, 4),
    ("chain", {}, 4, 2),
    ("chains", {"chains": 2}, 4, 4),
    ("chains", {"chains": 2, "budget": 3}, 4, 3),
    ("chains", {"chains": 3, "budget": 5}, 4, 5),
]


def pair(seed: int) -> tuple[Contextual, Contextual, Contextual]:
    """A target and two drafters. Every other time a second rejection of the same token changes
    what is left of p, which few random pairs of so few tokens have."""
    random = np.random.default_rng(seed)
    p, q, second = (Contextual(random, parts=4) for _ in range(3))
    if seed % 2:
        p.table[()] = np.array([0, 2, 2]) / 4
        q.table[()] = second.table[()] = np.array([3, 1, 0]) / 4
    return p, q, second


@pytest.mark.parametrize(("name", "options", "parts", "draws"), DRAWN)
def test_drawn_trees_are_lossless(
    name: str, options: dict[str, Any], parts: int, draws: int
) -> None:
    rng = GridNoise(grid(parts, draws))
    for seed in range(PAIRS):
        p, q, _ = pair(seed)
        draft = drafts_of(TableDrafter(q, SHAPES[name](**options)), rng)
        assert apart("multi_round", p, draft) < 1e-5


# --- nodes that are left out after all are drafted ------------------------------------------------


def cut(draft: Draft, price: float) -> np.ndarray:
    """Leave out what is not worth this price. Returns the number of nodes that each row had."""
    policy, sizes = Priced(2, price), draft.sizes
    policy.start(len(sizes))
    policy.depths()
    keep = policy.kept(draft)
    if keep is not None:
        leave_out(draft, keep)
    return sizes


PRICE = 0.3
# (rule, shape, options, parts of the grid, draws), as in DRAWN.
CUT = [
    ("speculative", "chain", {}, 4, 2),
    ("block", "chain", {}, 4, 2),
    ("multi_round", "static", {"widths": [2, 1], "draw": "independent"}, 4, 4),
    ("spectr", "static", {"widths": [2, 1], "draw": "independent"}, 4, 4),
    ("traversal", "static", {"widths": [1, 2], "draw": "independent"}, 4, 3),
    ("multi_round", "static", {"paths": [[0], [1], [2], [1, 0]], "draw": "distinct"}, 12, 4),
    ("traversal", "static", {"widths": [2, 1], "draw": "distinct"}, 12, 4),
    ("multi_round", "chains", {"chains": 2}, 4, 4),
    ("spectr", "chains", {"chains": 2, "budget": 3}, 4, 3),
]


def variation_of_cut(
    rule: str, shape: str, options: Any, parts: int, draws: int, seed: int, late: bool = False
) -> tuple[float, float]:
    """`apart` of drafts without the nodes that are not worth their price, and the share of the
    nodes that stay. late: a node is weighed by its own token's q, which is known when it is
    drawn."""
    p, q, _ = pair(seed)
    rng = GridNoise(grid(parts, draws))
    draft = drafts_of(TableDrafter(q, SHAPES[shape](**options)), rng, grows=lambda *level: True)
    if late:
        draft.confidence = draft.q_of_tokens().float()
    before = cut(draft, PRICE)
    stays = float(draft.sizes.sum() / before.sum())
    if not draft.sizes.any():
        return 0.0, stays
    return apart(rule, p, draft), stays


@pytest.mark.parametrize(("rule", "shape", "options", "parts", "draws"), CUT)
def test_without_nodes_that_do_not_pay_rules_are_lossless(
    rule: str, shape: str, options: Any, parts: int, draws: int
) -> None:
    found = [variation_of_cut(rule, shape, options, parts, draws, seed) for seed in range(PAIRS)]
    assert max(variation for variation, _ in found) < 1e-5
    # Some nodes are left out, and some of their rows have others.
    assert any(0.2 < stays < 0.95 for _, stays in found)


@pytest.mark.parametrize(("rule", "shape", "options", "parts", "draws"), CUT[:5])
def test_nodes_that_are_left_out_for_what_was_drawn_are_found(
    rule: str, shape: str, options: Any, parts: int, draws: int
) -> None:
    found = [
        variation_of_cut(rule, shape, options, parts, draws, seed, late=True)
        for seed in range(PAIRS)
    ]
    assert max(variation for variation, _ in found) > 0.02


@pytest.mark.parametrize("rule", ["multi_round", "spectr", "traversal"])
def test_a_branch_may_end_for_a_token_of_another_that_was_drawn_before(rule: str) -> None:
    """As a batch ends, by what was drawn in all of its rows and branches. Whether a rule accepts a
    node does not depend on what is below it."""
    shape = SHAPES["static"](widths=[2, 1], draw="independent")
    for seed in range(PAIRS):
        p, q, _ = pair(seed)
        draft = drafts_of(TableDrafter(q, shape), GridNoise(grid(4, 4)))
        draft.limit_depth(np.where(draft.tokens[:, 1] == 0, 1, 2))
        assert apart(rule, p, draft) < 1e-5


def variation_of_rest(by_source: Sequence[int], seed: int, late: bool = False) -> float:
    """`apart` of two drafters that are asked in turn and may draft so deep. late: the first one
    rests where its first token, once drawn, is 0."""
    p, q, second = pair(seed)
    chain, rng = SHAPES["chain"](), GridNoise(grid(4, 2))
    both = CompositeDrafter([TableDrafter(q, chain), TableDrafter(second, chain)])
    draft = drafts_of(both, rng, by_source=by_source)
    if late:
        rests, other = draft.tokens[:, :1] == 0, drafts_of(both, rng, by_source=(0, 2))
        assert draft.q is not None
        assert other.q is not None
        draft.tokens = torch.where(rests, other.tokens, draft.tokens)
        draft.q = torch.where(rests[..., None], other.q, draft.q)
    return apart("speculative", p, draft)


@pytest.mark.parametrize("by_source", [(2, 0), (0, 2), (0, 1), ()])
def test_drafters_that_rest_are_lossless(by_source: Sequence[int]) -> None:
    assert max(variation_of_rest(by_source, seed) for seed in range(PAIRS)) < 1e-5


def test_a_drafter_that_rests_for_what_it_drew_is_found() -> None:
    assert max(variation_of_rest((2, 0), seed, late=True) for seed in range(PAIRS)) > 0.02


def merged_drafts(other: str, seed: int) -> tuple[Contextual, Draft]:
    """A target, and all that a drafter which draws drafts together with others."""
    chain = SHAPES["chain"]()
    p, q, second = pair(seed)
    drafters: list[Drafter] = [TableDrafter(q, chain)]
    if other == "chain":
        drafters.append(TableDrafter(second, chain))
        rng = GridNoise(grid(4, 4), each=2)
    elif other == "chains":
        drafters.insert(0, TableDrafter(second, SHAPES["chains"](chains=2, budget=3)))
        rng = GridNoise(grid(4, 5), each=3)
    else:
        drafters = [FixedDraft((1, 2)), *drafters, FixedDraft((1, 0))]
        rng = GridNoise(grid(4, 2))
    several = SeveralDrafters(drafters)
    draft = drafts_of(several, rng)
    assert several.siblings(PLAIN) == draft.siblings == "mixed"
    return p, draft


MIXED = [
    rule
    for rule in RULES
    # Exact match emits the same tokens for every draft.
    if not issubclass(RULES[rule], ExactMatch)
    and RULES[rule].lossless
    and RULES[rule].judges(True, "mixed")
]


@pytest.mark.parametrize("other", ["chain", "chains", "chosen"])
@pytest.mark.parametrize("rule", MIXED)
def test_rules_for_mixed_siblings_are_lossless_on_merged_trees(rule: str, other: str) -> None:
    for seed in range(PAIRS if rule == "multi_round" else 2):
        assert apart(rule, *merged_drafts(other, seed)) < 1e-5


# Chains of which drafters are merged.
SPECTR_ON_MERGED = {
    "spectr, the merged chains of two models": "chain",
    "spectr, the merged chains of lookup and a model": "chosen",
}


def variation_of_merged(error: str) -> float:
    """The largest total variation of three targets and drafters."""
    merged = (merged_drafts(SPECTR_ON_MERGED[error], seed) for seed in range(3))
    return max(apart("spectr", p, draft) for p, draft in merged)


def test_the_rule_that_refuses_merged_trees_would_not_be_lossless_there() -> None:
    assert MIXED == ["multi_round", "traversal"]
    for error in SPECTR_ON_MERGED:
        assert variation_of_merged(error) > 0.05


def without_duplicates(draft: Draft) -> Draft:
    """The error of dropping a draw because an elder sibling has its token."""
    assert draft.parents is not None
    nodes = draft.tokens.shape[1]
    first = first_equal(draft.tokens, draft.parents, nodes)
    packed = pack(first == torch.arange(nodes), draft.parents)
    return packed.draft(draft.tokens, draft.q, draft.rows_of_q())


def without_the_unlikely(draft: Draft) -> Draft:
    """The error of pruning drawn tokens by their own q: the likeliest paths stay."""
    assert draft.parents is not None
    assert draft.q is not None
    q = draft.q.gather(1, draft.rows_of_q()[..., None].expand(-1, -1, TOKENS))
    own = q.gather(2, draft.tokens[..., None])[..., 0]
    keep = ~(draft.ancestors() & (own < 0.3)[:, None, :]).any(2)
    return pack(keep, draft.parents).draft(draft.tokens, draft.q, draft.rows_of_q())


CHANGED_CHAINS: dict[str, Callable[[Draft], Draft]] = {
    "chains, draws that an elder sibling has are dropped": without_duplicates,
    "chains, unlikely draws are pruned": without_the_unlikely,
}


def variation_of_chains(error: str) -> float:
    """The largest total variation of all targets and drafters."""
    rng = GridNoise(grid(4, 4))
    found = []
    for seed in range(PAIRS):
        p, q, _ = pair(seed)
        draft = drafts_of(TableDrafter(q, SHAPES["chains"](chains=2)), rng)
        found.append(apart("multi_round", p, CHANGED_CHAINS[error](draft)))
    return max(found)


@pytest.mark.parametrize("error", CHANGED_CHAINS)
def test_what_chains_must_not_do_is_found(error: str) -> None:
    assert variation_of_chains(error) > 0.02


# --- rows with greedy drafts ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "rule"),
    [
        ("chain", {}, "speculative"),
        ("chains", {"chains": 2}, "multi_round"),
        ("chains", {"chains": 2}, "spectr"),
        ("static", {"widths": [2], "draw": "independent"}, "traversal"),
        ("static", {"widths": [2], "draw": "distinct"}, "multi_round"),
    ],
)
def test_greedy_drafts_beside_drawn_ones_are_lossless(name: str, options: Any, rule: str) -> None:
    """Of the draft, not of the text. A control: judged by their one-hot q, they are not."""
    rows, p = 20_000, torch.tensor([0.5, 0.3, 0.2])
    kinds = np.arange(rows) % 2
    drafts, text = MixedSampling([Sampling(), PLAIN], kinds), PLAIN
    contexts, rng = contexts_of([[0]] * rows), noise_for(rows)
    growth = TableGrowth(contexts, lambda *path: np.array([0.2, 0.0, 0.8]), drafts)
    draft = SHAPES.make({"name": name, **options}).grow(growth, limits_of(contexts, 1), drafts, rng)
    scores = Scores(p.log().expand(rows, draft.tokens.shape[1] + 1, -1), text)

    def farthest(decision: Decision) -> float:
        first = draft.tokens.gather(1, decision.path[:, :1])[:, 0]
        tokens = torch.where(decision.accepted > 0, first, decision.next_token)
        counts = [torch.bincount(tokens[kinds == kind], minlength=3) for kind in (0, 1)]
        return max(float((2 * count / rows - p).abs().max()) for count in counts)

    assert (draft.chosen_rows() == (kinds == 0)).all()
    assert farthest(decided(RULES[rule](), draft, scores, rng)) < 0.02
    if draft.tokens.shape[1] > 1 and draft.drawn == "independent":
        draft._chosen_rows = None
        assert farthest(decided(RULES[rule](), draft, scores, rng)) > 0.1


# --- several drafters -----------------------------------------------------------------------------


def test_several_that_choose_are_merged() -> None:
    several = SeveralDrafters(
        [FixedDraft((1, 2, 0)), FixedDraft((1, 0)), FixedDraft((2,)), FixedDraft((1, 2, 1))]
    )
    contexts = contexts_of([[0], [0]])
    several.start(contexts)
    draft = several.draft(contexts, limits_of(contexts, 3), PLAIN, noise_for(2))
    assert several.siblings(PLAIN) == "chosen"
    assert draft.q is None
    for row in range(2):
        assert paths_of(draft, row) == [(1,), (2,), (1, 2), (1, 0), (1, 2, 0), (1, 2, 1)]


def test_parts_of_a_drafter_draw_independently() -> None:
    """Of each other, of the whole one's drafting and of the rule's; a row the same when alone."""
    rows = torch.arange(200_000)
    rng = CounterRNG(0, rows)
    rng.at_lengths(np.full(len(rows), 4))
    numbers = [rng.fork(part).uniforms(CounterRNG.DRAFT, 0, 2) for part in range(3)]
    numbers += [rng.uniforms(stream, 0, 2) for stream in (CounterRNG.DRAFT, CounterRNG.ACCEPT)]
    apart = np.corrcoef(torch.cat(numbers, 1).numpy().T) - np.eye(10)
    assert np.abs(apart).max() < 6 / len(rows) ** 0.5  # six standard deviations
    alone = CounterRNG(0, rows[7:8])
    alone.at_lengths(np.array([4]))
    assert torch.equal(alone.fork(1).uniforms(CounterRNG.DRAFT, 0, 2), numbers[1][7:8])


def test_several_keep_their_own_q_and_noise() -> None:
    """Each node of a small LM's chain is drawn as it would be alone, with numbers of its own."""
    models = [model("llama", layers=1, seed=seed) for seed in (7, 8, 7)]
    several = SeveralDrafters([*map(SmallLMDrafter, models), NgramDrafter()])
    contexts = contexts_of([[5, 6, 5], [9, 9], [7]])
    several.start(contexts)
    rng = noise_for(3)
    rng.at_lengths(contexts.lengths)
    draft = several.draft(contexts, limits_of(contexts, 2), PLAIN, rng)
    assert draft.q is not None
    # What prompt lookup finds: 6 5 after 5; 9 after 9; nothing.
    assert draft.sizes.tolist() == [8, 7, 6]
    found = [paths_of(draft, row) for row in range(3)]
    rows_of_q = draft.rows_of_q()
    for part, lm in enumerate(models):
        alone = SmallLMDrafter(lm)
        alone.start(contexts)
        chain = alone.draft(contexts, limits_of(contexts, 2), PLAIN, rng.fork(part))
        assert chain.q is not None
        for row in range(3):
            path = tuple(chain.tokens[row].tolist())
            for depth in range(2):
                nodes = [i for i, other in enumerate(found[row]) if other == path[: depth + 1]]
                declared = draft.q[row, rows_of_q[row, nodes]]
                assert any(torch.equal(q, chain.q[row, depth]) for q in declared)
    # The same model twice draws twice.
    assert len(set(found[2])) == 6
    looked_up = draft.q[0, rows_of_q[0, found[0].index((6,))]]
    assert (looked_up[6], looked_up.sum()) == (1, 1)


def test_several_drafters_are_refused() -> None:
    with pytest.raises(UserError, match="give at least one drafter"):
        SeveralDrafters([])
    distinct = SHAPES["static"](widths=[2], draw="distinct")
    several = SeveralDrafters([FixedDraft((1,)), SmallLMDrafter(model("llama"), shape=distinct)])
    with pytest.raises(UserError, match="SmallLMDrafter draws siblings without replacement"):
        several.siblings(PLAIN)
    assert several.siblings(Sampling()) == "chosen"
    merged = SeveralDrafters([NgramDrafter(), SmallLMDrafter(model("llama", layers=1))])
    said = "trees of mixed siblings, but the rule SpecTr judges independent siblings; choose a rule"
    with pytest.raises(UserError, match=rf"{said} for such trees: .*multi_round.*in turn \(A\+B\)"):
        Decoder(model("llama"), merged, rule="spectr", sampling=PLAIN)
    Decoder(model("llama"), merged, rule="spectr")  # greedy: exact match
    Decoder(model("llama"), merged, sampling=PLAIN)
