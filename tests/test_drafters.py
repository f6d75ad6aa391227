"""Drafters by themselves: what they look up, what they keep in caches, what q they declare."""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from decode.base.errors import UserError
from decode.draft import Contexts, Draft, Limits, Siblings
from decode.drafters import Drafter
from decode.drafters.draft_vocabulary import reduce_output
from decode.drafters.lookup.ngram import NgramDrafter, NgramStore, StoreDrafter, continuation
from decode.drafters.pard import ParallelLMDrafter, mark_parallel
from decode.drafters.several.combined import CompositeDrafter, SeveralDrafters
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling, draw
from decode.loop.decoding import Decoder
from decode.shapes import SHAPES
from decode.verdict import Decision, Scores
from decode.verification import Verification
from tests import lossless
from tests.test_loop import RandomTrees
from tests.test_slots import NewBytes
from tests.tiny import after, judged, padded, plain_texts, tiny_model, tokens_fed

GREEDY = Sampling()
model = functools.cache(tiny_model)


def contexts_of(texts: list[list[int]], room: int = 64) -> Contexts:
    return Contexts.of(texts, max(map(len, texts)) + room)


def append(contexts: Contexts, new: list[list[int]]) -> None:
    for row, tokens in enumerate(new):
        length = contexts.lengths[row]
        contexts.tokens[row, length : length + len(tokens)] = tokens
        contexts.lengths[row] += len(tokens)


def noise_for(rows: int) -> CounterRNG:
    return CounterRNG(0, torch.arange(rows))


def limits_of(contexts: Contexts, gamma: int) -> Limits:
    return Limits(np.full(len(contexts.lengths), gamma))


def drafted(draft: Draft) -> list[list[int]]:
    return [tokens[:size].tolist() for tokens, size in zip(draft.tokens, draft.sizes, strict=True)]


# --- drafts ---------------------------------------------------------------------------------------


def test_a_chain_is_a_tree_without_branches() -> None:
    tokens = torch.tensor([[5, 6, 7], [8, 9, 0]])
    chain = Draft(tokens, np.array([3, 2]))
    tree = Draft(tokens, np.array([3, 2]), parents=torch.tensor([[-1, 0, 1], [-1, 0, 1]]))
    assert torch.equal(chain.ancestors(), tree.ancestors())
    assert torch.equal(chain.parent_rows(), tree.parent_rows())
    assert chain.nodes_by_depth().tolist() == tree.nodes_by_depth().tolist()
    assert chain.nodes_by_depth().tolist() == [[1, 1, 1], [1, 1, 0]]
    for draft in (chain, tree):
        draft.limit_depth(np.array([1, 5]))
        assert draft.sizes.tolist() == [1, 2]
        assert draft.valid().tolist() == [[True, False, False], [True, True, False]]


def test_a_tree_knows_its_depths() -> None:
    parents = torch.tensor([[-1, -1, 0, 1, 1, 4]])
    tree = Draft(torch.arange(6)[None], np.array([6]), parents=parents)
    assert tree.nodes_by_depth().tolist() == [[2, 3, 1]]
    assert tree.ancestors()[0, 5].tolist() == [False, True, False, False, True, True]
    tree.limit_depth(np.array([2]))
    assert tree.sizes.tolist() == [5]


# --- n-grams --------------------------------------------------------------------------------------


def search(text: list[int], min_n: int, max_n: int, count: int) -> list[int]:
    """The obvious way: the longest ending first, the latest place first. `continuation` says how
    long the ending is, too."""
    found: tuple[list[int], int] = [], 0
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if not found[1] and n < len(text) and text[end - n : end] == text[-n:]:
                found = text[end : end + count], n
    assert continuation(np.array(text), min_n, max_n, count) == found
    return found[0]


@pytest.mark.parametrize(("vocab", "min_n", "max_n"), [(2, 2, 4), (5, 1, 3), (9, 1, 1), (5, 3, 3)])
def test_ngram_equals_a_search_of_the_whole_text(vocab: int, min_n: int, max_n: int) -> None:
    """In texts that grow by a few tokens a time, in several rows, of which some are dropped."""
    random = np.random.default_rng(vocab)
    texts: list[list[int]] = [random.integers(0, vocab, n).tolist() for n in (1, 2, 9, 30)]
    contexts = contexts_of(texts, room=200)
    drafter = NgramDrafter(min_n, max_n)
    drafter.start(contexts)
    found_any = False
    for step in range(30):
        draft = drafter.draft(contexts, limits_of(contexts, 4), GREEDY, noise_for(len(texts)))
        assert draft.q is None
        assert drafted(draft) == [search(text, min_n, max_n, 4) for text in texts]
        found_any |= bool(draft.sizes.any())
        new = [random.integers(0, vocab, random.integers(1, 6)).tolist() for _ in texts]
        texts = [text + tokens for text, tokens in zip(texts, new, strict=True)]
        append(contexts, new)
        drafter.observe(after(contexts))
        if step == 15:
            going = np.array([2, 0])
            texts = [texts[row] for row in going]
            contexts.keep_rows(going)
            drafter.keep_rows(going)
    assert found_any

    drafter.start(contexts)  # and nothing of the last batch is remembered
    assert drafted(drafter.draft(contexts, limits_of(contexts, 4), GREEDY, noise_for(2))) == [
        search(text, min_n, max_n, 4) for text in texts
    ]


@pytest.mark.parametrize("sizes", [(0, 3), (3, 2), (-1, 1), (1, 10**9)])
def test_bad_ngram_sizes_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(UserError, match=r"min_n=.*expected 1 ≤ min_n ≤ max_n"):
        NgramDrafter(*sizes)


# --- a smaller model ------------------------------------------------------------------------------


class Recording(SmallLMDrafter):
    """Checks each draft against one from scratch, by a plain forward over what it reads of the
    row's text."""

    drafts = 0

    def read_behind(self, tokens: list[int]) -> list[int]:
        """What it reads behind the text for this draft."""
        return tokens[:-1]

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        draft = super().draft(contexts, limits, sampling, rng)
        for row, tokens in enumerate(drafted(draft)):
            text = contexts.tokens[row, self._begin[row] : contexts.lengths[row]].tolist()
            if not tokens:
                continue
            with torch.inference_mode():
                ids = torch.tensor([text + self.read_behind(tokens)])
                logits = self.lm.model(ids).logits[0, len(text) - 1 :, : self.tokens]
            if sampling.greedy:
                assert tokens == logits.argmax(-1).tolist()
            else:
                assert draft.q is not None
                # The same sums in float32, in another order.
                q = draft.q[row, : len(tokens)]
                expected = torch.zeros_like(q)
                expected[:, : self.tokens] = sampling.probs(logits)
                torch.testing.assert_close(q, expected, rtol=1e-3, atol=1e-5)
            self.drafts += 1
        return draft


def test_a_text_longer_than_the_drafters_context_is_read_from_its_last_part(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sampling = Sampling(1.0)
    drafter = Recording(tiny_model("mistral", layers=1, seed=7, max_positions=12))
    fed = tokens_fed(drafter.lm)
    contexts = contexts_of([[5] * 8, [7], [9, 8] * 20])
    drafter.start(contexts)
    rng, begins = noise_for(3), []
    for _ in range(24):
        rng.at_lengths(contexts.lengths)
        draft = drafter.draft(contexts, limits_of(contexts, 3), sampling, rng)
        assert draft.sizes.tolist() == [3, 3, 3]
        begins.append(drafter._begin.tolist())
        append(contexts, [[9], [9], [9]])
        drafter.observe(after(contexts))
    assert drafter.drafts == 3 * 24
    # Of 12 tokens 3 are drafted; half a context is left out at a time, in each row by itself.
    assert [b for b, _, _ in begins] == [0] * 2 + [6] * 6 + [12] * 6 + [18] * 6 + [24] * 4
    assert [b for _, b, _ in begins] == [0] * 9 + [6] * 6 + [12] * 6 + [18] * 3
    assert [b for _, _, b in begins][:2] == [36] * 2
    # Two tokens of a draft, and the text: what a row begins with is fed again once in 6 tokens.
    assert sum(fed) < 3 * (24 * (2 + 1) + 40)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "has a context of 12 tokens, but a text is longer" in caplog.text


@pytest.mark.parametrize("name", ["chain", "dynamic:width=2,nodes=6"])
def test_greedy_text_is_plain_decodings_when_it_outgrows_the_drafter(name: str) -> None:
    """Prompts that never fit beside one that does, with chains and trees; and as deep a draft as
    the context lets there be."""
    small = tiny_model("llama", seed=7, layers=1, max_positions=12)
    prompts = [[5] * 40, [7], [5, 17, 250] * 4]
    plain = plain_texts(model("llama"), prompts, 24)
    for gamma in (3, 13):
        drafter = SmallLMDrafter(small, shape=SHAPES.make(name))
        found = Decoder(model("llama"), drafter, gamma=gamma).decode(prompts, 24)
        assert found.outputs == plain
        # Each step drafted, but for the last ones, which leave no room.
        assert found.counts.drafted[0] >= found.counts.steps - 3


@pytest.mark.parametrize(("kind", "lacking"), [(SmallLMDrafter, [3]), (ParallelLMDrafter, [0, 7])])
def test_a_row_that_lacks_much_is_fed_alone(kind: type[SmallLMDrafter], lacking: list[int]) -> None:
    small = tiny_model("llama", layers=1, seed=7, max_positions=256)
    mark_parallel(small.config, 3)
    drafter, whole = kind(small), kind(small)
    contexts = contexts_of([[5 + row] * 20 for row in range(8)], room=120)
    limits = Limits(np.full(8, 2))
    drafter.start(contexts)
    drafter.draft(contexts, Limits(np.ones(8, dtype=np.int64)), GREEDY, noise_for(8))
    append(contexts, [[9] * (100 if row in lacking else 1) for row in range(8)])
    drafter.observe(after(contexts))
    fed = tokens_fed(drafter.lm)
    draft = drafter.draft(contexts, limits, GREEDY, noise_for(8))
    # The 100 tokens of each such row, one of the others, and two passes over all for the draft.
    assert sum(fed) <= 100 * len(lacking) + 3 * 8
    whole.start(contexts)
    assert drafted(draft) == drafted(whole.draft(contexts, limits, GREEDY, noise_for(8)))


# --- the store ------------------------------------------------------------------------------------


def test_the_store_drafts_what_followed_most_often() -> None:
    store = StoreDrafter(min_n=1, max_n=2, top_k=1)
    contexts = contexts_of([[1, 2, 3, 1, 2, 4, 9, 2, 3, 1, 2], [7, 7]])
    store.start(contexts)
    draft = store.draft(contexts, limits_of(contexts, 3), GREEDY, noise_for(2))
    # After "1 2" a 3 and a 4 stood, once each, the 3 first; after "2 3" always a 1.
    assert drafted(draft) == [[3, 1, 2], [7, 7, 7]]
    assert draft.q is None
    append(contexts, [[4], [5]])
    store.observe(after(contexts))
    append(contexts, [[1, 2], [6]])
    store.observe(after(contexts))
    draft = store.draft(contexts, Limits(np.array([1, 1])), GREEDY, noise_for(2))
    assert drafted(draft) == [[4], []]  # now the 4 stands twice
    # The next request knows it too.
    contexts = contexts_of([[8, 1, 2]])
    store.start(contexts)
    assert drafted(store.draft(contexts, limits_of(contexts, 2), GREEDY, noise_for(1))) == [[4, 9]]


@pytest.mark.parametrize("parents", [None, [[-1, 0, 1, -1]] * 2], ids=["chain", "tree"])
def test_the_store_looks_only_at_the_logits_along_the_accepted_path(parents: Any) -> None:
    vocab = 4096
    store = StoreDrafter(min_n=1, max_n=2, top_k=1)
    contexts = contexts_of([[1, 2], [3, 4]])
    store.start(contexts)
    tokens = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    draft = Draft(tokens, np.array([4, 4]), parents=parents and torch.tensor(parents))
    likeliest = torch.tensor([[20, 21, 22, 23, 24], [30, 31, 32, 33, 34]])
    logits = torch.nn.functional.one_hot(likeliest, vocab).float()
    accepted, path = torch.tensor([1, 0]), torch.tensor([[0, 1, 2]] * 2)
    decision = Decision(path, accepted, accepted + 1, torch.tensor([40, 41]))
    done = replace(judged(draft, Scores(logits, GREEDY), decision, contexts), number=1)
    with NewBytes() as made:
        store.observe(done)
    assert [store.store.next(text) for text in ([1, 2], [2, 5], [3, 4])] == [20, 21, 30]
    assert store.store.next([6]) is store.store.next([9]) is None
    along = 2 * 2 * vocab * logits.itemsize  # of two rows, after no token and after one
    assert made.largest < (along / 4 if parents is None else along + 1)


def test_the_store_keeps_what_was_used_last_and_weighs_most() -> None:
    store = NgramStore(min_n=1, max_n=1, capacity=3, width=2)
    for token in (1, 2, 3):
        store.file([token], [10 * token])
    assert store.next([1]) == 10  # a look-up counts as use, so 2 goes
    store.file([4], [40])
    assert [store.next([token]) for token in (1, 2, 3, 4)] == [10, None, 30, 40]
    assert len(store) == 3
    for _ in range(1000):
        store.file([5], [51, 52, 53])  # weighing 1, 1/2 and 1/3
    assert store.next([5]) == 51
    assert store._followers[(5,)].keys() == {51, 52}
    for size in range(2000):
        store.file([size], [1])
    assert len(store) == 3
    with pytest.raises(UserError, match="capacity is 0; expected a whole number ≥ 1"):
        StoreDrafter(capacity=0)
    with pytest.raises(UserError, match="expected 1 ≤ min_n ≤ max_n"):
        StoreDrafter(min_n=3, max_n=2)


class Watched(StoreDrafter):
    """Checks what it is shown against plain forwards over the text."""

    shown = 0

    def observe(self, done: Verification) -> None:
        super().observe(done)
        for row, length in enumerate(done.lengths if done.number else []):
            text = done.contexts.tokens[row, :length].tolist()
            for place in range(int(done.accepted[row]) + 1):
                with torch.inference_mode():
                    logits = model("llama")(torch.tensor([text])).logits[0, -1]
                best = logits.topk(3).indices.tolist()
                # Filed last under this ending, so it is there.
                assert set(best) <= self.store._followers[tuple(text[-4:])].keys()
                text.append(int(done.block[row, place]))
                self.shown += 1


def test_the_store_is_fed_with_the_targets_likeliest_tokens() -> None:
    store = Watched(min_n=4, max_n=4, top_k=3, width=50)
    prompts = [[5, 17, 250, 9, 42], [7] * 5, [11, 12, 13, 14] * 3]
    plain = plain_texts(model("llama"), prompts, 24)
    first = Decoder(model("llama"), store, gamma=4).decode(prompts, 24)
    assert store.shown >= 60
    second = Decoder(model("llama"), store, gamma=4).decode(prompts, 24)
    assert first.outputs == second.outputs == plain
    # What was said before is known by heart.
    assert second.counts.steps < first.counts.steps
    assert second.counts.acceptance_rate > 0.9


def test_a_store_beside_others_is_fed_too() -> None:
    store = Watched(min_n=4, max_n=4, top_k=3, width=50)
    prompts = [[5, 17, 250, 9, 42], [7] * 5]
    run = Decoder(model("llama"), SeveralDrafters([NgramDrafter(), store]), gamma=3).decode(
        prompts, 12
    )
    assert store.shown >= 20
    assert run.outputs == plain_texts(model("llama"), prompts, 12)


# --- several drafters -----------------------------------------------------------------------------


class Trees(Drafter):
    """A root's two children and a grandchild, for rows that are asked; chosen, or drawn apart."""

    branches = True

    def __init__(self, distinct: bool) -> None:
        self.distinct = distinct

    def siblings(self, sampling: Sampling) -> Siblings:
        return "distinct" if self.distinct else "chosen"

    def max_nodes(self, gamma: int) -> int:
        return 3

    def start(self, contexts: Contexts) -> None:
        return None

    def draft(self, contexts: Contexts, limits: Limits, *rest: Any) -> Draft:
        rows = len(contexts.lengths)
        q = torch.full((rows, 2, 300), 1 / 300) if self.distinct else None
        return Draft(
            torch.tensor([[40, 41, 42]]).expand(rows, -1),
            3 * (limits.depths > 1),
            q,
            torch.tensor([[-1, -1, 1]]).expand(rows, -1),
            torch.tensor([[0, 0, 1]]).expand(rows, -1) if self.distinct else None,
            "distinct" if self.distinct else "independent",
        )


class Only(Drafter):
    """Another drafter, for one row only."""

    def __init__(self, row: int, drafter: Drafter) -> None:
        self.row, self.drafter = row, drafter

    @property
    def branches(self) -> bool:
        return self.drafter.branches

    def siblings(self, sampling: Sampling) -> Siblings:
        return self.drafter.siblings(sampling)

    def start(self, contexts: Contexts) -> None:
        self.drafter.start(contexts)

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        depths = np.where(np.arange(len(limits.depths)) == self.row, limits.depths, 0)
        return self.drafter.draft(contexts, Limits(depths), sampling, rng)


def test_a_composite_asks_in_turn() -> None:
    lookup, small = NgramDrafter(2, 2), Recording(model("llama", layers=1, seed=7))
    both = CompositeDrafter([lookup, small])
    sampling = Sampling(1.0)
    assert both.siblings(sampling) == "independent"
    assert both.vocab_size == 300
    contexts = contexts_of([[1, 2, 3, 1, 2], [4, 5], [6, 7, 6, 7, 6, 7]])
    both.start(contexts)
    draft = both.draft(contexts, Limits(np.array([3, 2, 1])), sampling, noise_for(3))
    assert draft.sizes.tolist() == [3, 2, 1]
    assert drafted(draft)[0] == [3, 1, 2]
    assert drafted(draft)[2] == [6]
    assert small.drafts == 1  # for the row that was left to it
    assert draft.q is not None
    for row, size in enumerate(draft.sizes):
        q_x = draft.q[row, :size].gather(1, draft.tokens[row, :size, None])[:, 0]
        torch.testing.assert_close(draft.q[row, :size].sum(-1), torch.ones(size))
        assert (q_x == 1).all() == (row != 1)
    assert draft.is_chain


def test_a_composite_of_a_chain_and_trees() -> None:
    contexts = contexts_of([[1, 2, 3, 1, 2], [4, 5]])
    for distinct in (False, True):
        both = CompositeDrafter([NgramDrafter(2, 2), Trees(distinct)])
        assert both.branches
        assert both.max_nodes(2) == 3
        both.start(contexts)
        draft = both.draft(contexts, limits_of(contexts, 2), Sampling(1.0), noise_for(2))
        assert drafted(draft) == [[3, 1], [40, 41, 42]]
        assert draft.parent_rows().tolist() == [[0, 1, 0], [0, 0, 2]]
        assert draft.nodes_by_depth().tolist() == [[1, 1], [2, 1]]
        assert draft.siblings == both.siblings(Sampling(1.0))
        if draft.q is not None:
            rows_of_q = draft.rows_of_q()
            assert rows_of_q.tolist() == [[0, 1, 2], [0, 0, 1]]
            assert draft.q[0, 0].argmax() == 3
            assert draft.q[0, 1].argmax() == 1
            assert draft.q[1, 1, 0] == pytest.approx(1 / 300)


def test_a_composite_of_drawn_chains_and_trees() -> None:
    """Drawn chains go with trees of any kind; chosen siblings beside them are mixed: each has a q
    of its own."""
    small = SmallLMDrafter(model("llama", layers=1))
    contexts = contexts_of([[1, 2, 3, 1, 2], [4, 5]])
    for distinct, kind in ((False, "mixed"), (True, "distinct")):
        both = CompositeDrafter([Only(0, Trees(distinct)), small])
        assert both.siblings(Sampling(1.0)) == kind
        both.start(contexts)
        draft = both.draft(contexts, limits_of(contexts, 2), Sampling(1.0), noise_for(2))
        assert draft.siblings == kind
        assert draft.parent_rows().tolist() == [[0, 0, 2], [0, 1, 0]]
        with torch.no_grad():
            second, whole = draft.q_of(torch.tensor([1, 0]), 300)
        # The second child, its elder gone from q or not; the first token of the chain.
        assert float(second[0, 41]) == (pytest.approx(1 / 300) if distinct else 1)
        assert whole.tolist() == pytest.approx([299 / 300 if distinct else 1, 1])
    assert CompositeDrafter([Trees(False), small]).siblings(GREEDY) == "chosen"


def test_what_a_composite_cannot_mix() -> None:
    small = SmallLMDrafter(model("llama", layers=1))
    with pytest.raises(UserError, match=r"cannot be combined .*Trees: chosen trees, Trees: disti"):
        CompositeDrafter([small, Trees(False), Trees(True)]).siblings(Sampling(1.0))
    with pytest.raises(UserError, match="at least one"):
        CompositeDrafter([])
    with pytest.raises(UserError, match=r"vocabularies of \[280, 300\]"):
        CompositeDrafter([small, SmallLMDrafter(model("llama", layers=1, vocab=280))])


def test_a_composite_gives_its_shape_to_those_that_have_one() -> None:
    both = CompositeDrafter([NgramDrafter(1, 3), SmallLMDrafter(model("llama", layers=1))])
    assert not both.branches
    trees = both.with_shape(SHAPES.make("static:widths=[2,2,1]"))
    assert trees.branches
    prompts = [[5, 17, 250, 9, 42], [7], [11, 12, 13, 14] * 3]
    run = Decoder(model("llama"), trees, gamma=3).decode(prompts, 24)
    assert run.outputs == plain_texts(model("llama"), prompts, 24)
    assert run.counts.nodes_per_step > 3
    with pytest.raises(UserError, match="does not take a shape"):
        CompositeDrafter([NgramDrafter()]).with_shape(SHAPES["chain"]())


# --- the first token, and parts that do not fit ---------------------------------------------------


def test_a_drafter_of_another_vocabulary_is_refused() -> None:
    other = SmallLMDrafter(model("llama", vocab=280))
    for drafter in (other, CompositeDrafter([NgramDrafter(), other])):
        with pytest.raises(UserError, match="vocabulary of 280 tokens, but the target's has 300"):
            Decoder(model("llama"), drafter)


def pair(target_rows: int, rows: int) -> tuple[Any, Any]:
    """A target and a drafter near it, of one tokenizer with 270 tokens."""
    both = tiny_model("llama", vocab=270, seed=5)
    return padded(both, target_rows, std=0.5), padded(both, rows)


@pytest.mark.parametrize(
    ("target_rows", "rows", "name"),
    [(300, 320, "dynamic:width=2,nodes=6"), (320, 280, "chain")],
)
def test_one_vocabulary_padded_to_other_sizes(target_rows: int, rows: int, name: str) -> None:
    """Greedy text is plain decoding's. The target says some ids that no tokenizer has, and that the
    drafter has no embedding for."""
    target, small = pair(target_rows, rows)
    prompts = [[5, 17, 250, 9, 42], [7], [30] * 9]
    drafter = SmallLMDrafter(
        small, shape=SHAPES.make(name, depth=3), vocab_size=target_rows, tokens=270
    )
    sampling = Sampling(repetition_penalty=1.2)
    for how in (GREEDY, sampling):
        found = Decoder(target, drafter, gamma=3, sampling=how).decode(prompts, 24)
        assert found.outputs == plain_texts(target, prompts, 24, sampling=how)
        assert max(max(output) for output in found.outputs) >= 270
        assert found.counts.accepted.sum() > 0
    if name == "chain":
        looked = CompositeDrafter([NgramDrafter(1, 2), drafter])
        found = Decoder(target, looked, gamma=3).decode(prompts, 24)
        assert found.outputs == plain_texts(target, prompts, 24)


@pytest.mark.parametrize(("target_rows", "rows"), [(300, 320), (320, 280)])
def test_padding_is_never_drafted_and_q_is_honest(target_rows: int, rows: int) -> None:
    _, small = pair(target_rows, rows)
    padding = SmallLMDrafter(small, vocab_size=target_rows, tokens=270)
    assert mismatches(padding, FILTERED, rows=500, gamma=4, vocab=270) == (0, 4000)
    padding = Recording(small, vocab_size=target_rows, tokens=270)
    contexts = contexts_of([[5, 6, 7], [8, 9]])
    padding.start(contexts)
    draft = padding.draft(contexts, limits_of(contexts, 3), Sampling(1.0), noise_for(2))
    assert draft.q is not None
    assert draft.q.shape == (2, 3, target_rows)
    assert draft.q[..., :270].min() > 0
    assert draft.q[..., 270:].max() == 0
    # The rows that are left out would have been drafted.
    probs = small(torch.tensor([[5, 6, 7]])).logits.softmax(-1)
    assert probs[..., 270:].sum(-1).max() > 0.1


def test_a_row_with_a_token_that_the_drafter_lacks_drafts_nothing() -> None:
    _, small = pair(320, 280)
    drafter = Recording(small, vocab_size=320, tokens=270)
    contexts = contexts_of([[5, 6, 7], [8, 9, 10, 11], [275, 9]])
    drafter.start(contexts)
    for number, expected in enumerate([[2, 2, 2], [2, 0, 2], [2, 0, 2]]):
        draft = drafter.draft(contexts, limits_of(contexts, 2), GREEDY, noise_for(3))
        assert draft.sizes.tolist() == expected
        append(contexts, [[20], [300 if number == 0 else 20], [275]])
        drafter.observe(after(contexts))
    assert drafter.drafts == 7


@pytest.mark.parametrize("name", ["trees", "same"])
def test_drafts_deeper_than_the_room_that_is_left(name: str) -> None:
    """Cut to what each row has, in the target's positions and in the drafter's."""
    small = tiny_model("gpt2", max_positions=20)
    prompts = [[5] * 17, [7]]
    plain = plain_texts(small, prompts, 64)
    assert [len(output) for output in plain] == [3, 19]
    drafters = {
        "trees": RandomTrees("gpt2"),
        "same": SmallLMDrafter(small),
    }
    run = Decoder(small, drafters[name], gamma=19, rule="exact").decode(prompts, 64)
    assert run.outputs == plain
    if name == "same":
        assert run.counts.by_accepted.nonzero()[0].max() == 17  # all but two of the 19


@pytest.mark.parametrize("prompt", [[5, 300], [-1, 5]])
def test_prompts_of_another_vocabulary_are_refused(prompt: list[int]) -> None:
    decoder = Decoder(model("llama"), NgramDrafter())
    with pytest.raises(UserError, match=r"prompt 1 has token ids from .*ids from 0 to 299"):
        decoder.decode([[5], prompt], 4)


# --- a drafter that draws otherwise than the target -----------------------------------------------


@pytest.mark.slow
def test_texts_have_the_targets_distribution() -> None:
    """The joint test of test_lossless, for a drafter with a sampling of its own: another
    temperature and fewer tokens."""
    own = replace(lossless.SAMPLING, temperature=1.1, top_k=9)
    decoder = lossless.SHORT.decoder(lossless.small_lm(), draft_sampling=own)
    run = decoder.decode([lossless.PROMPT] * 12_000, lossless.NEW)
    found = lossless.fit_texts(run.outputs, lossless.SHORT)
    assert found.passes, found
    assert found.df > 100
    assert (run.counts.reached.sum() - run.counts.accepted.sum()) / run.counts.steps >= 0.15


# --- promise 20: q is honest ----------------------------------------------------------------------


def mismatches(
    drafter: Drafter,
    sampling: Sampling,
    rows: int,
    gamma: int,
    vocab: int = 300,
    ids: torch.Tensor | None = None,
) -> tuple[int, int]:
    """Draws that the declared q, with the same uniforms, would not have given; and how many.
    ids: the draft vocabulary, in which the drafter draws."""
    random = np.random.default_rng(0)
    contexts = contexts_of(random.integers(3, vocab, (rows, 4)).tolist())
    wrong = total = 0
    drafter.start(contexts)
    rng = noise_for(rows)
    for _ in range(2):
        rng.at_lengths(contexts.lengths)
        draft = drafter.draft(contexts, limits_of(contexts, gamma), sampling, rng)
        if draft.q is not None:
            uniforms = rng.uniforms(CounterRNG.DRAFT, 0, draft.tokens.shape[1])
            again = draw(draft.q if ids is None else draft.q[..., ids], uniforms)
            again = again if ids is None else ids[again]
            wrong += int(((again != draft.tokens) & draft.valid()).sum())
            assert draft.q.dtype == torch.float32
        total += int(draft.sizes.sum())
        append(contexts, [[token] for token in random.integers(3, vocab, rows).tolist()])
        drafter.observe(after(contexts))
    return wrong, total


FILTERED = Sampling(0.7, top_k=20, top_p=0.9)


def test_q_over_a_reduced_vocabulary_is_honest() -> None:
    lm = tiny_model("llama", layers=1, seed=7)
    ids = torch.arange(4, 300, 3)
    reduce_output(lm, ids)
    drafter = SmallLMDrafter(lm.requires_grad_(False), ids)
    assert mismatches(drafter, FILTERED, rows=1000, gamma=4, ids=ids) == (0, 8000)

    contexts = contexts_of([[5, 6, 7]])
    drafter.start(contexts)
    draft = drafter.draft(contexts, limits_of(contexts, 3), Sampling(1.0), noise_for(1))
    assert draft.q is not None
    assert draft.q.shape == (1, 3, 300)
    assert draft.q.nonzero()[:, 2].unique().tolist() == ids.tolist()
    torch.testing.assert_close(draft.q.sum(-1), torch.ones(1, 3))
    drafter.start(contexts)
    greedy = drafter.draft(contexts, limits_of(contexts, 3), GREEDY, noise_for(1))
    assert set(greedy.tokens.flatten().tolist()) <= set(ids.tolist())
