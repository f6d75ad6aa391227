"""Drafters by themselves: what they look up, what they keep in caches, what q they declare."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from decode.draft import Draft
from decode.drafters import DRAFTERS, Contexts, Drafter, Limits
from decode.drafters.ngram import NgramDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.errors import UserError
from decode.loop import Decoder
from decode.sampling import Noise, Sampling, draw
from tests.tiny import FAMILIES, tiny_model

GREEDY = Sampling()
model = functools.cache(tiny_model)


def contexts_of(texts: list[list[int]], room: int = 64) -> Contexts:
    lengths = np.array([len(text) for text in texts])
    tokens = np.zeros((len(texts), int(lengths.max()) + room), dtype=np.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    return Contexts(tokens, lengths)


def append(contexts: Contexts, new: list[list[int]]) -> None:
    for row, tokens in enumerate(new):
        length = contexts.lengths[row]
        contexts.tokens[row, length : length + len(tokens)] = tokens
        contexts.lengths[row] += len(tokens)


def noise_for(rows: int, seed: int = 0) -> Noise:
    return Noise(seed, torch.arange(rows))


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
    """The obvious way: the longest ending first, the latest place first."""
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if n < len(text) and text[end - n : end] == text[-n:]:
                return text[end : end + count]
    return []


@pytest.mark.parametrize(("min_n", "max_n"), [(1, 1), (1, 3), (2, 4), (3, 3)])
@pytest.mark.parametrize("vocab", [2, 5, 9])
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
        drafter.commit(contexts)
        if step == 15:
            going = np.array([2, 0])
            texts = [texts[row] for row in going]
            contexts.keep_rows(going)
            drafter.keep_rows(torch.as_tensor(going))
    assert found_any

    drafter.start(contexts)  # and nothing of the last batch is remembered
    assert drafted(drafter.draft(contexts, limits_of(contexts, 4), GREEDY, noise_for(2))) == [
        search(text, min_n, max_n, 4) for text in texts
    ]


@pytest.mark.parametrize("sizes", [(0, 3), (3, 2), (-1, 1)])
def test_bad_ngram_sizes_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(UserError, match=r"min_n=.*expected 1 ≤ min_n ≤ max_n"):
        NgramDrafter(*sizes)


# --- a smaller model ------------------------------------------------------------------------------


class Recording(SmallLMDrafter):
    """Checks each draft against one from scratch, by a plain forward over the row's whole text."""

    drafts = 0

    def draft(self, contexts: Contexts, limits: Limits, sampling: Sampling, noise: Noise) -> Draft:
        draft = super().draft(contexts, limits, sampling, noise)
        for row, tokens in enumerate(drafted(draft)):
            text = contexts.tokens[row, : contexts.lengths[row]].tolist()
            if not tokens:
                continue
            with torch.inference_mode():
                ids = torch.tensor([text + tokens[:-1]])
                logits = self.lm.model(ids).logits[0, len(text) - 1 :]
            if sampling.greedy:
                assert tokens == logits.argmax(-1).tolist()
            else:
                assert draft.q is not None
                # The same sums in float32, in another order.
                torch.testing.assert_close(
                    draft.q[row, : len(tokens)], sampling.probs(logits), rtol=1e-3, atol=1e-5
                )
            self.drafts += 1
        return draft


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_is_exact_after_every_verdict(family: str, temperature: float) -> None:
    """Whatever is rejected, accepted or cut, the drafter goes on as if from scratch."""
    recording = Recording(model(family, layers=2, seed=3))
    # The target is the drafter with a little noise: it accepts often, and not always.
    noisy = tiny_model(family, layers=2, seed=3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in noisy.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    decoder = Decoder(noisy, recording, gamma=4, sampling=Sampling(temperature))
    prompts = [[5, 17, 250, 9, 42], [7], [30] * 9]
    run = decoder.decode(prompts, 24)
    assert recording.drafts >= 15
    by = run.counts.by_accepted
    assert by[4] > 0
    assert by[:4].sum() > 0


def test_what_a_drafter_lacks_after_full_acceptance() -> None:
    drafter = Recording(model("llama"))
    contexts = contexts_of([[5, 6, 7], [8, 9]])
    drafter.start(contexts)
    # All kept and one more; none kept; one row all, the other none: each leaves another gap.
    for kept in ([3, 3], [0, 0], [3, 0], [1, 2]):
        draft = drafter.draft(contexts, limits_of(contexts, 3), GREEDY, noise_for(2))
        tokens = draft.tokens.tolist()
        append(contexts, [[*tokens[row][: kept[row]], 100 + row] for row in range(2)])
        drafter.commit(contexts)
    drafter.keep_rows(torch.tensor([1]))
    contexts.keep_rows(np.array([1]))
    drafter.draft(contexts, limits_of(contexts, 3), GREEDY, noise_for(1))
    assert drafter.drafts == 9


@pytest.mark.parametrize("limit", ["positions", "window"])
def test_a_full_context_of_the_drafter_drafts_nothing(limit: str) -> None:
    shape = {"max_positions": 12} if limit == "positions" else {"sliding_window": 12}
    small: Any = tiny_model("mistral", layers=1, seed=7, **shape)
    drafter = Recording(small)
    contexts = contexts_of([[5] * 8, [7]])
    drafter.start(contexts)
    sizes = []
    for _ in range(14):
        draft = drafter.draft(contexts, limits_of(contexts, 3), GREEDY, noise_for(2))
        sizes.append(draft.sizes.tolist())
        append(contexts, [[9], [9]])
        drafter.commit(contexts)
    assert [row for row, _ in sizes] == [3, 3, 2, 1] + [0] * 10
    assert [row for _, row in sizes] == [3] * 9 + [2, 1, 0, 0, 0]

    # Prompts that never fit, beside one that does.
    prompts = [[5] * 40, [7]]
    whole = model("llama")
    run = Decoder(whole, SmallLMDrafter(small), gamma=3).decode(prompts, 24)
    plain = Decoder(whole, DRAFTERS["none"]()).decode(prompts, 24)
    assert run.outputs == plain.outputs
    assert 0 < run.counts.drafted.sum() < 3 * 12


# --- promise 20: q is honest ----------------------------------------------------------------------


def mismatches(drafter: Drafter, sampling: Sampling, rows: int, gamma: int) -> tuple[int, int]:
    """Draws that the declared q, with the same uniforms, would not have given; and how many."""
    random = np.random.default_rng(0)
    contexts = contexts_of(random.integers(3, 300, (rows, 4)).tolist())
    wrong = total = 0
    drafter.start(contexts)
    noise = noise_for(rows)
    for _ in range(2):
        noise.next_round()
        draft = drafter.draft(contexts, limits_of(contexts, gamma), sampling, noise)
        if draft.q is not None:
            uniforms = noise.uniforms(Noise.DRAFT, 0, draft.tokens.shape[1])
            again = draw(draft.q, uniforms)
            wrong += int(((again != draft.tokens) & draft.valid()).sum())
            assert draft.q.dtype == torch.float32
        total += int(draft.sizes.sum())
        append(contexts, [[token] for token in random.integers(3, 300, rows).tolist()])
        drafter.commit(contexts)
    return wrong, total


SAMPLINGS = (Sampling(1.0), Sampling(0.7, top_k=20, top_p=0.9))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_q_is_honest(sampling: Sampling) -> None:
    drafter = SmallLMDrafter(model("llama", layers=1, seed=7))
    wrong, total = mismatches(drafter, sampling, rows=12_500, gamma=4)
    assert total == 100_000
    assert wrong == 0


def test_q_over_a_reduced_vocabulary_is_honest() -> None:
    lm = tiny_model("llama", layers=1, seed=7)
    ids = torch.arange(4, 300, 3)
    output = torch.nn.Linear(32, len(ids), bias=False)
    output.weight = torch.nn.Parameter(lm.get_output_embeddings().weight[ids].clone())
    lm.set_output_embeddings(output)
    drafter = SmallLMDrafter(lm.requires_grad_(False), ids)
    assert mismatches(drafter, SAMPLINGS[1], rows=1000, gamma=4) == (0, 8000)

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


class Cold(SmallLMDrafter):
    def draft(self, contexts: Contexts, limits: Limits, sampling: Sampling, noise: Noise) -> Draft:
        cold = replace(sampling, temperature=0.99 * sampling.temperature)
        draft = super().draft(contexts, limits, cold, noise)
        assert draft.q is not None
        draft.q = draft.q**0.99
        return draft


class Chosen(SmallLMDrafter):
    """Trap 1: the likeliest token is chosen, and the whole distribution declared."""

    def draft(self, contexts: Contexts, limits: Limits, sampling: Sampling, noise: Noise) -> Draft:
        draft = super().draft(contexts, limits, sampling, noise)
        assert draft.q is not None
        draft.tokens = draft.q.argmax(-1)
        return draft


@pytest.mark.parametrize("dishonest", [Cold, Chosen])
def test_a_dishonest_q_is_found(dishonest: Callable[[Any], Drafter]) -> None:
    wrong, _ = mismatches(dishonest(model("llama", layers=1, seed=7)), SAMPLINGS[0], 1000, 4)
    assert wrong > 10


@pytest.mark.parametrize("name", ["none", "ngram"])
def test_drafters_that_choose_declare_no_q(name: str) -> None:
    contexts = contexts_of([[1, 2, 3, 1, 2], [4]])
    drafter = DRAFTERS[name]()
    drafter.start(contexts)
    draft = drafter.draft(contexts, limits_of(contexts, 3), Sampling(1.0), noise_for(2))
    assert draft.q is None
    assert drafted(draft) == ([[], []] if name == "none" else [[3, 1, 2], []])
