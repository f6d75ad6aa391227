"""Cascades: drafters that speed up a drafter, and drafters that continue one another's chains."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decode.base.errors import UserError
from decode.draft import Contexts, Draft, Limits
from decode.drafters import DRAFTERS, Drafter
from decode.drafters.lookup.max_gram import LONGEST_MATCH, MaxGramDrafter, longest_match
from decode.drafters.lookup.ngram import NgramDrafter
from decode.drafters.lookup.suffix import SuffixDrafter
from decode.drafters.several.cascade import HorizontalCascade, VerticalCascade
from decode.drafters.several.combined import CompositeDrafter, Group
from decode.drafters.skip import SkipDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.loop.decoded import Decoded
from decode.loop.decoding import Decoder
from decode.opening.combinations import COMBINATIONS
from decode.opening.directory import open_drafter, partition_drafters
from decode.rules import RULES
from decode.shapes import SHAPES
from tests.enumeration import Contextual, enumerate_chains, enumerate_drafts, total_variation
from tests.lossless import FixedDraft
from tests.test_sparse import sparse as few_tokens
from tests.tiny import moved, padded, plain_texts, save_tiny, tiny_model, tiny_target, tokens_fed

GREEDY = Sampling()
PROMPTS = [[5, 17, 250, 9, 42], [7], [11, 12, 13, 14] * 3, [30] * 9]
model = functools.cache(tiny_model)


@functools.cache
def near(seed: int, apart: float) -> Any:
    """The target with weights moved a little, so that it often agrees."""
    return moved(tiny_model("llama"), apart, seed)


def middle(**options: Any) -> SmallLMDrafter:
    return SmallLMDrafter(near(1, 0.02), **options)


INNER: dict[str, Callable[[], Drafter]] = {
    "ngram": lambda: NgramDrafter(1, 3),
    "model": lambda: SmallLMDrafter(near(2, 0.03)),
    "cascade": lambda: VerticalCascade(SmallLMDrafter(near(2, 0.03)), NgramDrafter(), gamma=2),
    "nothing": DRAFTERS["none"],
}


def run(drafter: Drafter, new: int = 24, **options: Any) -> Decoded:
    return Decoder(model("llama"), drafter, **({"gamma": 5} | options)).decode(PROMPTS, new)


def accepted(done: Decoded) -> list[list[int]]:
    return [step.accepted.tolist() for step in done.steps]


# --- vertical -------------------------------------------------------------------------------------


def variation(inner: str, outer: str, depth: int) -> float:
    """The largest total variation, over three targets and drafters, between the target and every
    outcome of a round of the inner drafter, then every outcome of the outer rule, where q is the
    middle model at each place."""
    random = np.random.default_rng(depth)
    apart = []
    for _ in range(3):
        p, m, q = (Contextual(random, least=2) for _ in range(3))
        texts = enumerate_chains(RULES[inner](), m, q, depth, longest=2)
        assert {len(text) for text in texts} <= {1, 2}
        tokens = np.array([(*text, 0)[:2] for text in texts])
        declared = np.array([[m(), m(x)] for x, _ in tokens])
        draft = Draft(
            torch.as_tensor(tokens),
            np.array([len(text) for text in texts]),
            torch.as_tensor(declared, dtype=torch.float32),
            torch.tensor([[-1, 0]]).expand(len(tokens), -1),
        )
        judged = enumerate_drafts(RULES[outer](), p, draft, np.array(list(texts.values())))
        apart.append(total_variation(judged.joint, p.joint()))
    return max(apart)


@pytest.mark.parametrize(
    ("inner", "outer", "depth"),
    [("speculative", "speculative", 2), ("speculative", "block", 1), ("block", "traversal", 2)],
)
def test_drafts_that_end_with_an_inner_block_are_judged_exactly(
    inner: str, outer: str, depth: int
) -> None:
    assert variation(inner, outer, depth) < 1e-4


# The depth of the inner drafts.
LENIENT_INSIDE = {f"a cascade's inner rule lenient, drafts of {depth}": depth for depth in (1, 2)}


def variation_of_lenient(error: str) -> float:
    return variation("lenience", "speculative", LENIENT_INSIDE[error])


@pytest.mark.parametrize("error", LENIENT_INSIDE)
def test_a_lenient_inner_rule_is_found(error: str) -> None:
    assert variation_of_lenient(error) > 0.01


@pytest.mark.parametrize(
    ("made", "inner", "rounds"),
    [
        (middle, "model", None),
        (middle, "ngram", 2),
        (middle, "cascade", 2),
        (middle, "nothing", 2),
        (few_tokens, "ngram", None),  # TriForce: the target over a part of its cache
    ],
)
def test_a_vertical_cascade_drafts_what_its_model_drafts(
    made: Callable[[], Any], inner: str, rounds: int | None
) -> None:
    """Greedy drafts, and drafts with the noise of the text, are those of the model alone: also over
    many rounds, in ragged rows, and where drafts were rejected at any place."""
    for sampling, rule in ((GREEDY, None), (Sampling(0.7), "coupled")):
        options = {"sampling": sampling, "rule": rule}
        alone = run(made(), **options)
        both = run(VerticalCascade(made(), INNER[inner](), gamma=3, rounds=rounds), **options)
        assert both.outputs == alone.outputs
        assert 0.1 < both.counts.acceptance_rate < 1
        if rounds is None:
            assert accepted(both) == accepted(alone)
        else:
            assert both.counts.drafted.sum() < alone.counts.drafted.sum()


def test_a_vertical_cascade_takes_fewer_passes_of_its_model() -> None:
    sped = middle()
    passes = tokens_fed(sped.lm)
    same = SmallLMDrafter(sped.lm.model)
    drafter = VerticalCascade(sped, same, gamma=3)
    done = Decoder(model("llama"), drafter, gamma=8).decode(PROMPTS[:1], 33)
    # All inner drafts are accepted: 8 tokens take two passes, and the prompt one.
    assert len(passes) <= 1 + 2 * len(done.steps)
    assert done.counts.drafted.sum() > 3 * len(passes)


def test_a_model_with_fewer_rows_and_a_short_context() -> None:
    """Rows past the model's vocabulary are never drafted, whatever the inner drafter says, and a
    text longer than its context is read in part."""
    small = tiny_model("llama", layers=1, seed=7, max_positions=16)
    target = padded(model("llama"), 310, std=0.5)
    ids = torch.arange(0, 300, 2)
    small.set_output_embeddings(torch.nn.Linear(32, 150, bias=False))
    lm = SmallLMDrafter(small, ids, vocab_size=310)
    cascade = VerticalCascade(lm, FixedDraft((308, 4)), gamma=2)
    done = Decoder(target, cascade, gamma=4).decode(PROMPTS, 30)
    assert done.outputs == plain_texts(target, PROMPTS, 30)
    contexts = Contexts.of(PROMPTS, 40)
    cascade.start(contexts)
    noise = CounterRNG(0, torch.arange(len(PROMPTS)))
    draft = cascade.draft(contexts, Limits(np.array([4, 3, 0, 1])), Sampling(1.0), noise)
    assert draft.sizes.tolist() == [4, 3, 0, 1]
    assert draft.q is not None
    assert not draft.q[..., 300:].any()
    assert not draft.q[..., 1::2].any()
    for row, size in enumerate(draft.sizes):
        torch.testing.assert_close(draft.q[row, :size].sum(-1), torch.ones(size))


def test_a_policy_stops_a_cascade_where_it_stops_its_model() -> None:
    for policy in ("heuristic", "confidence:threshold=0.3", "entropy", "draft_exit:threshold=0.3"):
        options = {"policy": policy, "gamma": 5}
        alone = run(middle(), **options)
        both = run(VerticalCascade(middle(), NgramDrafter(1, 2), gamma=3), **options)
        assert both.outputs == alone.outputs
        assert [step.drafted.tolist() for step in both.steps] == [
            step.drafted.tolist() for step in alone.steps
        ]
        assert [step.signals.keys() for step in both.steps] == [
            step.signals.keys() for step in alone.steps
        ]


@pytest.mark.parametrize("rule", ["top_k:k=3", "threshold:threshold=0.02"])
def test_a_lossy_inner_rule_serves_greedy_drafts_only(rule: str) -> None:
    lenient = VerticalCascade(middle(), INNER["model"](), rule=rule)
    plain = run(DRAFTERS["none"]())
    done = run(lenient)
    assert done.outputs == plain.outputs
    assert accepted(done) != accepted(run(middle()))
    with pytest.raises(UserError, match=r"inner rule T.* is lossy.*draft_temperature 0"):
        run(lenient, sampling=Sampling(1.0))
    # Chosen tokens need no q, whatever the target draws.
    sampled = run(lenient, sampling=Sampling(1.0), draft_sampling=GREEDY, rule="exact")
    expected = run(DRAFTERS["none"](), sampling=Sampling(1.0), rule="exact")
    assert sampled.outputs == expected.outputs


@pytest.mark.parametrize("rule", ["lenience", "typical"])
def test_a_lossy_inner_rule_that_would_do_nothing_is_refused(rule: str) -> None:
    with pytest.raises(UserError, match=r"exact match for greedy drafts.*use threshold or"):
        VerticalCascade(middle(), NgramDrafter(), rule=rule)


def test_what_a_cascade_refuses() -> None:
    tree = middle(shape=SHAPES.make("static:widths=[2,1]"))
    for make in (
        lambda: VerticalCascade(middle(), tree),
        lambda: HorizontalCascade(tree, NgramDrafter()),
    ):
        with pytest.raises(UserError, match="drafts trees, and the"):
            make()
    other = SmallLMDrafter(tiny_model("llama", layers=1, vocab=280))
    for cascade in (VerticalCascade, HorizontalCascade):
        with pytest.raises(UserError, match=r"vocabularies of \[280, 300\]"):
            cascade(middle(), other)

    for spec in ("vertical:model=m,inner=trees", "horizontal:first=trees,later=m"):
        parts = {"m": middle(), "trees": SuffixDrafter(tree_nodes=4)}
        with pytest.raises(UserError, match="SuffixDrafter drafts trees, and a part of a cascade"):
            COMBINATIONS.make(spec).open(parts.__getitem__, tiny_target())
    opened = {"tree": tree, "lookup": NgramDrafter()}.__getitem__
    horizontal = COMBINATIONS.make("horizontal:first=tree,later=lookup")
    assert not horizontal.open(opened, tiny_target()).branches  # drafters may have a tree
    opened = {"model": middle(), "tree": tree}.__getitem__
    vertical: Any = COMBINATIONS.make("vertical:model=model,inner=tree").open(opened, tiny_target())
    assert not vertical.inner.branches

    class Reading(NgramDrafter):
        captured_layers = (1,)

    HorizontalCascade(Reading(), NgramDrafter())
    with pytest.raises(UserError, match="reads the target's hidden states, and the later"):
        HorizontalCascade(NgramDrafter(), Reading())
    with pytest.raises(UserError, match="reads the target's hidden states, and the inner"):
        VerticalCascade(middle(), Reading())
    with pytest.raises(UserError, match="gamma is 0"):
        VerticalCascade(middle(), NgramDrafter(), gamma=0)
    with pytest.raises(UserError, match="unknown verification rule"):
        VerticalCascade(middle(), NgramDrafter(), rule="spekulative")

    with pytest.raises(UserError, match="reads the target's keys and values, and the later"):
        HorizontalCascade(middle(), CompositeDrafter([NgramDrafter(), SkipDrafter("1")]))

    class Stateful(NgramDrafter):
        rewind = Drafter.rewind

    for make in (
        lambda: VerticalCascade(middle(), Stateful()),
        lambda: HorizontalCascade(Stateful(), CompositeDrafter([SuffixDrafter(), NgramDrafter()])),
    ):
        with pytest.raises(UserError, match="takes back no tokens"):
            make()


# --- horizontal -----------------------------------------------------------------------------------


def test_a_horizontal_cascade_of_one_model_is_that_model() -> None:
    depth = 3
    for sampling, rule in ((GREEDY, None), (Sampling(0.7), "coupled")):
        options = {"sampling": sampling, "rule": rule}
        alone = run(middle(), **options)
        both = run(HorizontalCascade(middle(), middle(), depth=depth), **options)
        assert both.outputs == alone.outputs
        assert accepted(both) == accepted(alone)
        lookups = run(
            HorizontalCascade(middle(), HorizontalCascade(NgramDrafter(), MaxGramDrafter())),
            **options,
        )
        assert lookups.outputs == alone.outputs
        assert lookups.counts.by_accepted[2:].sum() > 0


def test_each_token_of_a_horizontal_cascade_has_its_q() -> None:
    both = HorizontalCascade(middle(), NgramDrafter(1, 2), depth=2)
    assert both.siblings(Sampling(1.0)) == "independent"
    contexts = Contexts.of([[1, 2, 3, 1, 2], [4, 5], [6]], 20)
    both.start(contexts)
    limits = Limits(np.array([4, 1, 0]))
    noise = CounterRNG(0, torch.arange(3))
    # So that the lookup has a match after any drawn token.
    both.later.start(contexts)
    before = np.array([*range(300), *range(300)])
    both.later._sources = [before] * 3  # type: ignore[attr-defined]
    draft = both.draft(contexts, limits, Sampling(1.0), noise)
    assert draft.sizes.tolist()[1:] == [1, 0]
    assert draft.sizes[0] >= 2
    q_x = draft.q_of_tokens()
    assert (q_x[0, :2] < 1).all()
    assert (q_x[0, 2 : draft.sizes[0]] == 1).all()
    assert q_x[1, 0] < 1
    assert contexts.tokens[0, 5:].sum() == 0  # it writes into no text


def test_a_policy_that_stops_the_first_drafter_stops_the_draft() -> None:
    both = HorizontalCascade(middle(), MaxGramDrafter(), depth=2)
    done = run(both, policy="confidence:threshold=0.9,min_depth=1", gamma=5)
    plain = run(DRAFTERS["none"]())
    assert done.outputs == plain.outputs
    drafted = np.concatenate([step.drafted[step.depths > 1] for step in done.steps])
    assert (drafted == 1).sum() > 3
    done = run(both, policy="draft_exit:threshold=1", gamma=5)
    assert done.outputs == plain.outputs
    drafted = np.concatenate([step.drafted[step.depths > 0] for step in done.steps])
    assert (drafted == 1).all()  # the token that ends a draft is in it


# --- lookups --------------------------------------------------------------------------------------


def test_max_gram_follows_the_longest_match_then_bigrams() -> None:
    random = np.random.default_rng(1)
    for _ in range(50):
        text = random.integers(0, 3, int(random.integers(1, 15)))
        size = len(text)
        best = max(
            (
                (n, end)
                for end in range(1, size)
                for n in range(1, end + 1)
                if (text[end - n : end] == text[size - n :]).all()
            ),
            default=(0, size),
        )
        assert longest_match(text) == best[1]
    # Of two matches that are long enough, the later one counts, not the longer one.
    same = list(range(10, 10 + LONGEST_MATCH))
    assert longest_match(np.array([1, *same, 2, *same, 3, 1, *same])) == 2 * LONGEST_MATCH + 2
    drafter = MaxGramDrafter()
    contexts = Contexts.of([[1, 2, 3, 8, 1, 2], [9, 3], [40, 41, 40]], 20)
    drafter.start(contexts)
    noise = CounterRNG(0, torch.arange(3))
    draft = drafter.draft(contexts, Limits(np.array([5, 2, 3])), GREEDY, noise)
    chains = [row[:size].tolist() for row, size in zip(draft.tokens, draft.sizes, strict=True)]
    # After the match 3 8 1 2 comes the bigram 2 3; after 9 3, which stands once, 3 8.
    assert chains == [[3, 8, 1, 2, 3], [8, 1], [41, 40, 41]]
    assert run(MaxGramDrafter()).outputs == run(DRAFTERS["none"]()).outputs


# --- by name --------------------------------------------------------------------------------------


def test_a_plus_joins_paths_and_names(tmp_path: Path) -> None:
    """Also where a path has a + in it."""
    target = tiny_target()
    small, plus = (str(save_tiny(tmp_path / x, layers=1, seed=7)) for x in ("small", "small+2"))
    for spec, kinds in (
        (plus, "SmallLMDrafter"),
        (f"{small}+ngram", "CompositeDrafter(SmallLMDrafter, NgramDrafter)"),
        (f"ngram+{plus}", "CompositeDrafter(NgramDrafter, SmallLMDrafter)"),
        (f"{small}++{plus}", "SeveralDrafters(SmallLMDrafter, SmallLMDrafter)"),
        (
            f"{plus}:window=64,sinks=2++{small}+ngram:max_n=2",
            "SeveralDrafters(SmallLMDrafter, CompositeDrafter(SmallLMDrafter, NgramDrafter))",
        ),
        (
            f"{plus}+vertical:model={small},inner=ngram+store",
            "CompositeDrafter(SmallLMDrafter, VerticalCascade(SmallLMDrafter, "
            "CompositeDrafter(NgramDrafter, StoreDrafter)))",
        ),
    ):
        assert _kinds(open_drafter(spec, target)) == kinds
    for spec, parts in (
        ("embedded:eagle1-smollm2-135m+ngram", ("embedded:eagle1-smollm2-135m", "+", "ngram")),
        ("org/small:vocabulary=text++org/b", ("org/small:vocabulary=text", "++", "org/b")),
        ("no/such/path+ngram", ("no/such/path+ngram", "", "")),
    ):
        assert partition_drafters(spec) == parts


def _kinds(drafter: Drafter) -> str:
    kind = type(drafter).__name__
    if not isinstance(drafter, Group):
        return kind
    return f"{kind}({', '.join(map(_kinds, drafter.drafters))})"


def test_combinations_are_opened_by_name(tmp_path: Path) -> None:
    target = tiny_target()
    small = str(save_tiny(tmp_path / "small", layers=1, seed=7))
    cascade = open_drafter(f"vertical:model={small},inner=ngram+store,rounds=2", target)
    assert isinstance(cascade, VerticalCascade)
    assert isinstance(cascade.inner, CompositeDrafter)
    assert (cascade.gamma, cascade.rounds) == (4, 2)
    both = open_drafter(f"ngram+horizontal:first={small},later='max_gram:top_k=2',depth=3", target)
    assert isinstance(both, CompositeDrafter)
    later = both.drafters[1]
    assert isinstance(later, HorizontalCascade)
    assert later.depth == 3
    assert isinstance(later.later, MaxGramDrafter)
    assert later.later.top_k == 2
    for spec, message in (
        ("vertical:inner=ngram", "needs the option model"),
        ("vertical:model=ngram", "expected a small language model, or sparse"),
        (f"vertical:model={small},gama=3", r"no option 'gama'.*gamma"),
        ('ngram+measured:drafters=["store","ngram"]', "'measured' is gone; A.B asks"),
    ):
        with pytest.raises(UserError, match=message):
            open_drafter(spec, target)
