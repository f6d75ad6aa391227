"""Verification rules alone: their output's whole distribution, edge cases, and what goes with what.

Shapes: B rows, N drafted nodes, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pytest
import torch

from decode.base.errors import UserError
from decode.draft import Contexts, Draft, Siblings
from decode.drafters import Drafter
from decode.draw.constraint import Constraint, Guide
from decode.draw.mixed_sampling import MixedSampling
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling, draw
from decode.loop.decoding import Decoder
from decode.rules import RULES, Rule
from decode.rules.exact import ExactMatch
from decode.verdict import Scores
from decode.verification import Verification
from tests.enumeration import (
    PLAIN,
    TOKENS,
    Contextual,
    Enumerated,
    SetNoise,
    add_outcome,
    drawing_by_cdf,
    enumerate_rule,
    logits_of,
    total_variation,
)
from tests.mutants import (
    BonusOffByOne,
    FirstReject,
    JudgedAsDistinct,
    NotRenormalised,
    WrongResidualRow,
)
from tests.tiny import tiny_model, verify

# Parents of the nodes, breadth-first, and the tokens of drafts that are chosen.
DRAFTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "nothing": ((), ()),
    "token": ((-1,), (1,)),
    "chain": ((-1, 0), (1, 2)),
    "tree": ((-1, -1, 0, 0), (0, 2, 1, 2)),
    "wide": ((-1, -1, -1, 1), (0, 2, 1, 1)),
    # The same token twice, and children of it both times.
    "twins": ((-1, -1, 0, 1), (1, 1, 0, 2)),
}
CHAINS = ("nothing", "token", "chain")
SIBLINGS: tuple[Siblings, ...] = get_args(Siblings)
LOSSLESS = [name for name in RULES if RULES[name].lossless and name not in ("exact", "coupled")]


def pairings() -> list[tuple[str, str, Siblings]]:
    """(rule, draft, siblings): all that go together, and differ."""
    return [
        (rule, draft, siblings)
        for rule in LOSSLESS
        for draft in DRAFTS
        for siblings in SIBLINGS
        if RULES[rule].judges(draft not in CHAINS, siblings)
        and not (draft in CHAINS and siblings in ("distinct", "mixed"))
        and not (draft == "twins" and siblings != "chosen")
    ]


def enumerated(
    rule: Rule,
    draft: str,
    siblings: Siblings,
    seed: int,
    masks: Callable[[np.random.Generator, Contextual], Any] | None = None,
) -> tuple[Contextual, Enumerated]:
    """The law that texts must have, and what a rule makes of drafts that know nothing of it. masks:
    makes a constraint of p, which has `masked(p)`. None: there is none, and the law is p."""
    random = np.random.default_rng(seed)
    # To draw without replacement there must be enough to draw.
    p, q = Contextual(random), Contextual(random, least=3 if siblings == "distinct" else 1)
    parents, tokens = DRAFTS[draft]
    declared: Any = {
        "chosen": None,
        # Two drafters that draw, and one that chooses: all of its q is in one token.
        "mixed": [q, Contextual(random), Contextual(random, parts=1)],
    }.get(siblings, q)
    grammar = None if masks is None else masks(random, p)
    law = p if grammar is None else grammar.masked(p)
    return law, enumerate_rule(rule, p, declared, parents, siblings, tokens, grammar, law)


@pytest.mark.parametrize(("rule", "draft", "siblings"), pairings())
def test_the_output_has_the_targets_distribution(rule: str, draft: str, siblings: Siblings) -> None:
    for seed in (0, 1) if draft in CHAINS else (0,):
        p, found = enumerated(RULES[rule](), draft, siblings, seed)
        # Probabilities are float32, thresholds found to 2⁻²².
        np.testing.assert_allclose(found.joint, p.joint(), atol=1e-6)


# A rule, a draft and its siblings: an error, or a lossy rule.
ERRORS: dict[str, tuple[Rule, str, Siblings]] = {
    "residual of the wrong row": (WrongResidualRow(), "chain", "independent"),
    "bonus of the wrong row": (BonusOffByOne(), "chain", "independent"),
    "multi_round, distinct siblings, q not renormalised": (
        NotRenormalised("multi_round"),
        "tree",
        "distinct",
    ),
    "traversal, distinct siblings, q not renormalised": (
        NotRenormalised("traversal"),
        "tree",
        "distinct",
    ),
    "multi_round, independent siblings judged as distinct": (
        JudgedAsDistinct("multi_round"),
        "tree",
        "independent",
    ),
    "traversal, independent siblings judged as distinct": (
        JudgedAsDistinct("traversal"),
        "tree",
        "independent",
    ),
    "block ends at the first rejection, a chain": (FirstReject(), "chain", "independent"),
    "spectr, distinct siblings": (RULES["spectr"](), "tree", "distinct"),
    # It takes the first child's q for all.
    "spectr, mixed siblings": (RULES["spectr"](), "tree", "mixed"),
    "spectr, mixed siblings, a wide tree": (RULES["spectr"](), "wide", "mixed"),
    "lenience 0.8 (a lossy rule)": (RULES["lenience"](lenience=0.8), "chain", "independent"),
    "threshold (a lossy rule)": (RULES["threshold"](), "chain", "independent"),
    "typical (a lossy rule)": (RULES["typical"](), "tree", "independent"),
}


def variations(error: str) -> Iterator[float]:
    """The total variation for each of four targets and drafters."""
    pairs = (enumerated(*ERRORS[error], seed) for seed in range(4))
    return (total_variation(found.joint, p.joint()) for p, found in pairs)


def variation(error: str) -> float:
    """The largest of them."""
    return max(variations(error))


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_or_a_lossy_rule_is_found(error: str) -> None:
    assert any(found > 0.005 for found in variations(error))


def test_lenience_of_1_is_lossless_and_less_accepts_more() -> None:
    rule: Any = RULES["lenience"](lenience=1.0)
    p, strict = enumerated(rule, "chain", "independent", seed=0)
    np.testing.assert_allclose(strict.joint, p.joint(), atol=1e-6)
    assert rule.lossless  # so chosen drafts give the same text as with speculative sampling
    rule.lenience = 0.5  # as it may be set while decoding
    assert not rule.lossless
    lenient = enumerated(rule, "chain", "independent", seed=0)[1]
    assert lenient.emitted > strict.emitted + 0.05


def test_tokens_expected_of_each_rule() -> None:
    """Block verification is at least as good as speculative sampling, here sometimes better."""
    gained = []
    for seed in (3, 5, 9):
        single, block = (
            enumerated(RULES[rule](), "chain", "independent", seed)[1].emitted
            for rule in ("speculative", "block")
        )
        gained.append(block - single)
    assert min(gained) > -1e-5
    assert max(gained) > 0.05


@dataclass
class Exact:
    """Exact match over a grid of numbers, on a tree: logits: [1, N+1, V], those of p. grid: float64
    [M, 3], a number for each place in the text. draft: the tree in each of M rows."""

    logits: torch.Tensor
    grid: np.ndarray
    draft: Draft

    @classmethod
    def of(cls, p: Contextual, parts: int) -> "Exact":
        """parts: all probabilities are multiples of 1/parts, so a grid of that many numbers sees
        the law: the numbers belong to places in the text."""
        parents, tokens = (-1, -1, 0, 0, 1), (0, 2, 1, 2, 0)
        numbers = (np.arange(parts) + 0.5) / parts
        grid = np.stack(np.meshgrid(*[numbers] * 3, indexing="ij"), -1).reshape(-1, 3)
        contexts: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens, parents, strict=True):
            contexts.append((*contexts[parent + 1], token))
        draft = Draft(
            torch.tensor([tokens]).expand(len(grid), -1),
            np.full(len(grid), 5),
            parents=torch.tensor([parents]).expand(len(grid), -1),
        )
        return cls(logits_of(np.stack([p(*context) for context in contexts]))[None], grid, draft)

    def verdict(self, rule: str, rng: CounterRNG, grammar: Constraint | None) -> Verification:
        contexts = Contexts.of([(0,)] * len(self.grid), 1)
        if grammar is not None:
            contexts.guides = [Guide(grammar, 1) for _ in self.grid]
        logits = self.logits.expand(len(self.grid), -1, -1)
        return verify(RULES[rule](), self.draft, Scores(logits, PLAIN, self.draft, contexts), rng)

    def texts(self, verdict: Verification) -> list[tuple[int, ...]]:
        """The tokens that each row emits."""
        paths = np.take_along_axis(self.draft.tokens.numpy(), verdict.nodes, 1).tolist()
        each = zip(paths, verdict.accepted.tolist(), verdict.next_token.tolist(), strict=True)
        return [(*path[:accepted], following) for path, accepted, following in each]

    def joint(self, law: Contextual, grammar: Constraint | None = None) -> tuple[np.ndarray, int]:
        """([V, V, V]: the law of three tokens, those missing drawn from `law`; the most tokens that
        a row accepts)."""
        with drawing_by_cdf():
            verdict = self.verdict("exact", SetNoise(self.grid, self.grid), grammar)
        joint = np.zeros((TOKENS,) * 3)
        for *path, last in self.texts(verdict):
            add_outcome(joint, law, tuple(path), np.eye(TOKENS)[last], 1 / len(self.grid))
        return joint, int(verdict.accepted.max())


def test_exact_match_by_enumeration_on_trees() -> None:
    random = np.random.default_rng(0)
    for _ in range(3):
        p = Contextual(random, parts=4)
        joint, accepted = Exact.of(p, 4).joint(p)
        np.testing.assert_allclose(joint, p.joint(), atol=1e-12)
        assert accepted == 2


# --- batches of random trees ----------------------------------------------------------------------

VOCAB, ROWS, NODES = 12, 60, 9
FILTERED = Sampling(1.0, top_k=8)


def random_draft(siblings: Siblings, *, chain: bool = False, seed: int = 0) -> Draft:
    """Another tree in each row, some empty; tokens drawn as `siblings` says from a q per node."""
    random = np.random.default_rng(seed)
    sizes = random.integers(0, NODES + 1, ROWS)
    parents = np.zeros((ROWS, NODES), dtype=np.int64)
    tokens = np.zeros((ROWS, NODES), dtype=np.int64)
    logits = random_logits(seed) + random_logits(-1)
    q = FILTERED.probs(logits)
    for row in range(ROWS):
        # Sorted, so that shallow nodes come before deeper ones.
        parents[row] = np.sort(random.integers(-1, np.arange(NODES)))
        if chain:
            parents[row] = np.arange(NODES) - 1
        if siblings == "mixed":  # a q for each node, near that of its parent
            above = logits[row, torch.as_tensor(parents[row]) + 1]
            q[row, 1:] = FILTERED.probs(above + random_logits(-2)[row, 1:])
        for node in range(NODES):
            own = node + 1 if siblings == "mixed" else parents[row, node] + 1
            weights = q[row, own].numpy().astype(np.float64)
            if siblings in ("chosen", "distinct"):
                weights[tokens[row, :node][parents[row, :node] == parents[row, node]]] = 0
            if weights.sum() == 0:
                weights[:] = 1
            tokens[row, node] = random.choice(VOCAB, p=weights / weights.sum())
    return Draft(
        torch.as_tensor(tokens),
        sizes,
        None if siblings == "chosen" else q,
        None if chain else torch.as_tensor(parents),
        torch.arange(1, NODES + 1).expand(ROWS, -1) if siblings == "mixed" else None,
        drawn="independent" if siblings == "chosen" else siblings,
    )


def random_logits(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + seed)
    return 2 * torch.randn(ROWS, NODES + 1, VOCAB, generator=generator)


def only(draft: Draft, row: int) -> Draft:
    """One row's draft, without padding."""
    size = int(draft.sizes[row])
    return Draft(
        draft.tokens[row : row + 1, :size],
        draft.sizes[row : row + 1],
        None if draft.q is None else draft.q[row : row + 1],
        None if draft.parents is None else draft.parents[row : row + 1, :size],
        None if draft.q_rows is None else draft.q_rows[row : row + 1, :size],
        drawn=draft.drawn,
    )


def outcome(verdict: Verification, row: int) -> tuple[list[int], int, int]:
    accepted = int(verdict.accepted[row])
    path = verdict.nodes[row, :accepted].tolist()
    return path, int(verdict.reached[row]), int(verdict.next_token[row])


@pytest.mark.parametrize("siblings", SIBLINGS)
@pytest.mark.parametrize("rule", list(RULES))
def test_rows_of_different_trees_do_not_disturb_each_other(rule: str, siblings: Siblings) -> None:
    for chain in (True, False):
        if not RULES[rule].judges(not chain, siblings):
            continue
        draft, logits = random_draft(siblings, chain=chain), random_logits(0)
        rng = CounterRNG(0, torch.arange(ROWS))
        together = verify(RULES[rule](), draft, Scores(logits, FILTERED), rng)
        p = FILTERED.probs(logits)
        depths = set()
        for row in range(ROWS):
            size = int(draft.sizes[row])
            path, reached, following = outcome(together, row)
            if row % 3 == 0:
                alone = verify(
                    RULES[rule](),
                    only(draft, row),
                    Scores(logits[row : row + 1, : size + 1], FILTERED),
                    CounterRNG(0, torch.tensor([row])),
                )
                assert (path, reached, following) == outcome(alone, 0)
            # A path of this row's tree; one more position was reached if there was one to judge.
            above = draft.parent_rows()[row, :size] - 1
            assert above[path].tolist() == [-1, *path][: len(path)]
            assert reached == len(path) + bool((above == [-1, *path][-1]).any())
            if RULES[rule].lossless:
                assert all(p[row, above[node] + 1, draft.tokens[row, node]] > 0 for node in path)
                assert p[row, [-1, *path][-1] + 1, following] > 0
            depths.add(len(path))
        assert len(depths) > 2


@pytest.mark.parametrize("rule", ["exact", "coupled"])
def test_exact_match_draws_only_where_its_text_goes(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same verdict as from draws at all nodes, also where siblings are equal."""
    exact = RULES[rule]()
    assert isinstance(exact, ExactMatch)
    mixed = MixedSampling([FILTERED, PLAIN, Sampling()], np.arange(ROWS) % 3)
    for seed, sampling in enumerate([FILTERED, mixed, Sampling()]):
        draft = random_draft("independent", seed=seed)
        scores, rng = Scores(random_logits(seed), sampling), CounterRNG(seed, torch.arange(ROWS))
        rng.at_lengths(np.arange(ROWS) % 5 + 1)
        assert (exact._on_paths(draft, scores, rng) < 0).float().mean() > 0.5
        few = verify(exact, draft, scores, rng)
        with monkeypatch.context() as patch:
            patch.setattr("decode.rules.exact.reads_are_free", lambda device: False)
            every = verify(exact, draft, scores, rng)
        assert [outcome(few, row) for row in range(ROWS)] == [
            outcome(every, row) for row in range(ROWS)
        ]
        assert few.accepted.max() > 1


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize(
    ("rule", "same"),
    [
        ("multi_round", "speculative"),
        ("spectr", "speculative"),
        ("lenience", "speculative"),
        ("traversal", "block"),
    ],
)
def test_rules_that_are_one_on_chains(rule: str, same: str, chosen: bool) -> None:
    """With the same random numbers, also for rows that drafted little or nothing."""
    options = {"lenience": 1.0} if rule == "lenience" else {}
    for seed in range(6):
        draft = random_draft("chosen" if chosen else "independent", chain=True, seed=seed)
        scores = Scores(random_logits(seed), FILTERED)
        if RULES[rule].trees and seed % 2:
            draft.parents = torch.arange(-1, NODES - 1).expand(ROWS, -1)
        one = verify(RULES[rule](**options), draft, scores, CounterRNG(seed, torch.arange(ROWS)))
        draft.parents = None
        other = verify(RULES[same](), draft, scores, CounterRNG(seed, torch.arange(ROWS)))
        assert [outcome(one, row) for row in range(ROWS)] == [
            outcome(other, row) for row in range(ROWS)
        ]


# --- edges ----------------------------------------------------------------------------------------


def tree_of(tokens: list[int], parents: list[int], q: list[float] | None, **fields: Any) -> Draft:
    """One row, the same q at every node."""
    stacked = None if q is None else torch.tensor(q).expand(1, len(tokens) + 1, -1)
    return Draft(
        torch.tensor([tokens]),
        np.array([len(tokens)]),
        stacked,
        torch.tensor([parents]) if max(parents, default=-1) != len(parents) - 2 else None,
        **fields,
    )


def judged(
    rule: str, draft: Draft, p: list[float], accept: float, following: float
) -> Verification:
    nodes = draft.tokens.shape[1]
    logits = logits_of(np.tile(np.array(p), (1, nodes + 1, 1)))
    rng = SetNoise(np.full((1, nodes), accept), np.array([[following]]))
    with drawing_by_cdf():
        return verify(RULES[rule](), draft, Scores(logits, PLAIN), rng)


@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("rule", LOSSLESS)
def test_a_draft_that_breaks_after_its_first_token_keeps_the_law(rule: str, chain: bool) -> None:
    if not RULES[rule].judges(not chain, "independent"):
        return
    rows, p, q = 10_000, torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    rng = CounterRNG(0, torch.arange(rows))
    tokens = draw(q.expand(rows, 3, -1), rng.uniforms(CounterRNG.DRAFT, 0, 3))
    broken = torch.stack([q, torch.full_like(q, torch.nan), q]).expand(rows, -1, -1)
    parents = None if chain else torch.arange(-1, 2).expand(rows, -1)
    draft = Draft(tokens, np.full(rows, 3), broken, parents)
    found = verify(RULES[rule](), draft, Scores(p.log().expand(rows, 4, -1), PLAIN), rng)
    assert found.accepted.max() == 1
    both = found.accepted == 1
    for texts in (found.block[:, 0], found.block[both, 1]):
        shares = np.bincount(texts, minlength=3) / len(texts)
        assert np.abs(shares - p.numpy()).max() < 0.025
    # As many as if the draft ended before the token that is broken.
    assert abs(both.mean() - torch.minimum(p, q).sum()) < 0.025


@pytest.mark.parametrize("rule", LOSSLESS)
def test_a_residual_of_nothing_falls_back_to_p(rule: str) -> None:
    """p = q rejects nothing but by rounding; what it rejects then must still be drawn from p."""
    p = [0.5, 0.5, 0.0]
    # Token 2 cannot be drawn from this q, so it is rejected and leaves a residual of zeros.
    drafts = [tree_of([2], [-1], p), tree_of([2, 2], [-1, 0], p)]
    if RULES[rule].trees:
        drafts.append(tree_of([2, 2, 2], [-1, -1, 0], p))
        if "distinct" in RULES[rule].siblings:
            # Another child was drawn than there are tokens; the last is worth nothing.
            drafts.append(tree_of([2, 2, 2], [-1, -1, -1], p, drawn="distinct"))
    for draft in drafts:
        for following, token in ((0.25, 0), (0.75, 1)):
            verdict = judged(rule, draft, p, 0.5, following)
            assert (int(verdict.accepted[0]), int(verdict.next_token[0])) == (0, token)


@pytest.mark.parametrize("rule", LOSSLESS)
def test_a_certain_token_always_stays(rule: str) -> None:
    """At the upper end of the uniforms too; and p = q accepts whatever was drawn."""
    almost = 1 - 2.0**-53
    for q in ([0.0, 1.0, 0.0], None):
        verdict = judged(rule, tree_of([1, 1], [-1, 0], q), [0.0, 1.0, 0.0], almost, almost)
        assert (int(verdict.accepted[0]), int(verdict.next_token[0])) == (2, 1)
    verdict = judged(rule, tree_of([0, 1], [-1, 0], [0.5, 0.5]), [0.5, 0.5], almost, 0.0)
    assert (int(verdict.accepted[0]), int(verdict.reached[0]), int(verdict.next_token[0])) == (
        2,
        2,
        0,
    )


@pytest.mark.parametrize("rule", [name for name in LOSSLESS if RULES[name].trees])
def test_children_that_hold_all_of_p_leave_nothing_to_reject(rule: str) -> None:
    if "chosen" in RULES[rule].siblings:
        draft = tree_of([0, 1], [-1, -1], None)
        assert int(judged(rule, draft, [0.5, 0.5, 0.0], 1 - 2.0**-53, 0.0).accepted[0]) == 1


def test_threshold_compares_p_itself() -> None:
    draft = tree_of([0, 1, 1], [-1, 0, 1], None)
    p = [0.3, 0.7]
    assert int(judged("threshold", draft, p, 0.99, 0.5).accepted[0]) == 3
    rule = RULES["threshold"](threshold=0.4)
    logits = logits_of(np.tile(np.array(p), (1, 4, 1)))
    rng = SetNoise(np.zeros((1, 3)), np.array([[0.1]]))
    with drawing_by_cdf():
        sampled = verify(rule, draft, Scores(logits, PLAIN), rng)
    assert (int(sampled.accepted[0]), int(sampled.reached[0]), int(sampled.next_token[0])) == (
        0,
        1,
        0,
    )
    greedy = verify(rule, draft, Scores(logits, Sampling()), rng)
    assert (int(greedy.accepted[0]), int(greedy.next_token[0])) == (0, 1)


def test_typical_acceptance_takes_the_longest_path_then_the_likeliest() -> None:
    # Two children of the root, one below each, and a third child that is likely but childless.
    draft = tree_of([1, 2, 0, 1, 2], [-1, -1, -1, 0, 1], None)
    p = [0.5, 0.3, 0.2, 0.0]
    verdict = judged("typical", draft, p, 0.5, 0.0)
    assert outcome(verdict, 0) == ([0, 3], 2, 0)  # 0.3·0.3 beats 0.2·0.2
    # Of certain p nothing passes but the token itself, whatever ε would let through.
    sure = [0.905, 0.095, 0.0, 0.0]
    assert outcome(judged("typical", draft, sure, 0.5, 0.0), 0)[0] == [0, 3]
    draft = tree_of([1, 0], [-1, -1], None)
    assert outcome(judged("typical", draft, [0.915, 0.085], 0.5, 0.0), 0) == ([1], 1, 0)
    # A flat p lets less likely ones pass: δ·exp(−H) = 0.3/20.
    flat = [0.05] * 20
    assert outcome(judged("typical", draft, flat, 0.5, 0.99), 0) == ([0], 1, 19)


# --- options, and what goes with what -------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "options", "said"),
    [
        ("lenience", {"lenience": 0.0}, r"lenience is 0.0; expected a number in \(0, 1\]"),
        ("lenience", {"lenience": 1.5}, "lenience is 1.5"),
        ("threshold", {"threshold": 1.2}, "threshold is 1.2; expected a probability"),
        ("threshold", {"threshold": float("nan")}, "threshold is nan"),
        ("typical", {"epsilon": 0.0}, r"epsilon is 0.0; expected a number in \(0, 1\]"),
        ("typical", {"delta": -1.0}, "delta is -1.0; expected a number > 0"),
    ],
)
def test_bad_options_are_refused(rule: str, options: dict[str, float], said: str) -> None:
    factory: Callable[..., Rule] = RULES[rule]
    with pytest.raises(UserError, match=said):
        factory(**options)


class Stand(Drafter):
    """Drafts nothing; says what it would draft."""

    def __init__(self, branches: bool, siblings: Siblings) -> None:
        self._branches, self._siblings = branches, siblings

    @property
    def branches(self) -> bool:
        return self._branches

    def siblings(self, sampling: Sampling) -> Siblings:
        return self._siblings

    def start(self, contexts: Contexts) -> None:
        return None

    def draft(self, contexts: Contexts, *rest: Any) -> Draft:
        return Draft.none(len(contexts.lengths), "cpu")


EVERY_TREE = frozenset(SIBLINGS)
NO_TREE: frozenset[str] = frozenset()


@pytest.mark.parametrize(
    ("rule", "trees"),
    [
        ("exact", EVERY_TREE),
        ("coupled", EVERY_TREE),
        ("speculative", NO_TREE),
        ("block", NO_TREE),
        ("multi_round", EVERY_TREE),
        ("traversal", EVERY_TREE),
        ("spectr", frozenset({"independent"})),
        ("lenience", NO_TREE),
        ("top_k", EVERY_TREE),
        ("typical", EVERY_TREE),
        ("threshold", NO_TREE),
    ],
)
def test_what_goes_with_what(rule: str, trees: frozenset[str]) -> None:
    model = tiny_model("llama", layers=1)
    for siblings in SIBLINGS:
        Decoder(model, Stand(False, siblings), rule=rule, sampling=PLAIN)
        if siblings in trees:
            Decoder(model, Stand(True, siblings), rule=rule, sampling=PLAIN)
            continue
        said = f"Stand drafts trees of {siblings} siblings, but the rule {RULES[rule].__name__} "
        with pytest.raises(UserError, match=f"{said}.*rule for such trees: .*multi_round"):
            Decoder(model, Stand(True, siblings), rule=rule, sampling=PLAIN)
        # At temperature 0 exact match takes the place of all that come to it.
        if RULES[rule].exact_when_greedy:
            Decoder(model, Stand(True, siblings), rule=rule)


def test_every_rule_is_in_the_table() -> None:
    marks = test_what_goes_with_what.pytestmark  # type: ignore[attr-defined]
    assert {rule for rule, _ in marks[0].args[1]} == set(RULES)


def test_lossy_rules_say_so() -> None:
    lossy = {"lenience", "threshold", "top_k", "typical"}
    assert {name for name in RULES if not RULES[name].lossless} == lossy
    for name in lossy:
        assert "Lossy" in (RULES[name].__doc__ or "")
