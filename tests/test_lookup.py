"""Drafters that look tokens up: in a trie of texts, in a datastore, in a pool of n-grams."""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from decode.base.artifact import CorruptArtifact
from decode.base.errors import UserError
from decode.draft import Contexts, Draft, Limits
from decode.drafters import NoDrafter
from decode.drafters.lookup.documents import (
    SORT_BYTES,
    SUFFIXES,
    TOKENS,
    Datastore,
    sorted_suffixes,
    write_datastore,
)
from decode.drafters.lookup.lookahead import LookaheadDrafter
from decode.drafters.lookup.rest import RestDrafter, RestOptions, write_rest
from decode.drafters.lookup.suffix import Node, Place, SuffixDrafter, SuffixTrie
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.model.loading import Target
from decode.opening.directory import open_drafter, save_drafter
from decode.settings import EvaluationProtocol
from decode.shapes import SHAPES
from decode.verification import Verification
from tests.lossless import longer_model
from tests.stages import examples, make_stage, plan_stage, run_stage, stage_context, with_examples
from tests.tiny import tiny_target
from tests.training import Killed
from train.measure.evaluation import evaluate
from train.run.config_checks import validate_config
from train.settings.generate_config import GenerateConfig

GREEDY = Sampling()
NO_RNG: Any = None  # these drafters draw nothing
PROMPTS = [[0, 2, 1], [1], [3, 0, 2, 2, 1, 0, 1, 3]]
NEW = 30
WIDE: dict[str, Any] = {"max_spec_factor": 2.0, "min_token_prob": 0.0}


def drafted(drafter: Any, text: Sequence[int], depth: int) -> Draft:
    """The draft after a text of one row that has just begun."""
    contexts = Contexts.of([text], len(text) + 1)
    drafter.start(contexts)
    return drafter.draft(contexts, Limits(np.array([depth])), GREEDY, NO_RNG)


def paths(draft: Draft) -> dict[tuple[int, ...], int]:
    """{the tokens from the root to a node: its number}, of the first row."""
    seen: list[tuple[int, ...]] = []
    for node in range(draft.sizes[0]):
        parent = int(draft.parents_on_host()[0, node])
        seen.append((*(seen[parent] if parent >= 0 else ()), int(draft.tokens[0, node])))
    assert [len(path) for path in seen] == sorted(len(path) for path in seen)
    assert len(set(seen)) == len(seen)
    return {path: node for node, path in enumerate(seen)}


def occurrences(texts: Sequence[Sequence[int]], depth: int) -> Counter[tuple[int, ...]]:
    """How often each sequence of at most `depth` tokens occurs: the definition."""
    return Counter(
        tuple(text[i:j])
        for text in texts
        for i in range(len(text))
        for j in range(i + 1, min(i + depth, len(text)) + 1)
    )


# --- suffix decoding ------------------------------------------------------------------------------


def counts_of(trie: SuffixTrie) -> dict[tuple[int, ...], int]:
    """Every sequence in the trie with its count; shares are checked on the way."""
    counts: dict[tuple[int, ...], int] = {}

    def walk(sequence: tuple[int, ...], place: Place) -> None:
        if sequence:
            counts[sequence] = place.count if isinstance(place, Node) else 1
        if len(sequence) < trie.max_depth:
            followers = trie.followers(place)
            assert not followers or sum(share for _, share, _ in followers) == pytest.approx(1)
            for token, _, following in followers:
                walk((*sequence, token), following)

    root = trie.find(())
    assert root is not None
    walk((), root)
    return counts


@pytest.mark.parametrize("depth", [2, 5, 24])
def test_a_trie_has_the_counts_of_its_texts(depth: int) -> None:
    """Also while a text grows, and after the oldest ones were dropped."""
    chance = random.Random(depth)
    for _ in range(20):
        trie, texts = SuffixTrie(depth), []
        for _ in range(10):
            text = [chance.randrange(3) for _ in range(chance.randrange(12))]
            cut = chance.randrange(len(text) + 1)
            trie.extend(text[:cut])
            assert counts_of(trie) == occurrences([*texts, text[:cut]], depth)
            trie.extend(text[cut:])
            trie.close()
            texts.append(text)
            if chance.random() < 0.5:
                trie.drop_first()
                del texts[0]
            assert counts_of(trie) == occurrences(texts, depth)
            assert len(trie) == len(texts)
        while texts:
            trie.drop_first()
            del texts[0]
        assert counts_of(trie) == {}
        assert not trie._tokens


def best_by_definition(
    texts: Sequence[Sequence[int]], text: Sequence[int], *, depth: int, limit: int, tree: int | None
) -> tuple[float, int]:
    """(score, number of nodes) of the best draft: Algorithm 1 of the paper on plain counts, with a
    budget of twice the match."""
    count = occurrences(texts, depth)
    best = (0.0, 0)
    for match in range(1, min(len(text), depth - 1) + 1):
        start = tuple(text[-match:])
        if not count[start]:
            break
        probability = {start: 1.0}
        frontier: dict[tuple[int, ...], float] = {}
        nodes: list[float] = []
        at = start
        while len(nodes) < min(2 * match, limit if tree is None else tree):
            following = {(*at, t): count[(*at, t)] for t in range(3) if count[(*at, t)]}
            if len(at) < min(match + limit, depth):
                total = sum(following.values())
                options = {path: probability[at] * n / total for path, n in following.items()}
                if tree is None:
                    frontier = {}
                frontier |= options
            elif tree is None:
                break
            if not frontier:
                break
            at = max(frontier, key=lambda path: (frontier[path], -len(path)))
            probability[at] = frontier.pop(at)
            nodes.append(probability[at])
            if tree is None and not any(count[(*at, t)] for t in range(3)):
                break
        best = max(best, (sum(nodes), len(nodes)), key=lambda one: round(one[0], 9))
    return best


@pytest.mark.parametrize("tree", [None, 6])
def test_the_draft_is_the_best_one_of_all_matches(tree: int | None) -> None:
    chance = random.Random(1)
    larger = 0
    for _ in range(60):
        others = [[chance.randrange(3) for _ in range(20)] for _ in range(2)]
        text = [chance.randrange(3) for _ in range(14)]
        drafter = SuffixDrafter(6, tree_nodes=tree, **WIDE)
        for other in others:
            drafter.outputs.extend(other)
            drafter.outputs.close()
        draft = drafted(drafter, text, 4)
        limits: dict[str, Any] = {"depth": 6, "limit": 4, "tree": tree}
        scores = [best_by_definition(texts, text, **limits)[0] for texts in ([text], others)]
        # The score of what was drafted, by the counts of the texts that it was taken from.
        score = 0.0
        rows = drafter._rows[0].trie, drafter.outputs
        for trie in rows:
            score = max(score, drafter._best(trie, text[-5:], 4).score)
        assert score == pytest.approx(max(scores))
        larger += scores[1] > scores[0]
        assert len(paths(draft)) > 0
        assert all(len(path) <= 4 for path in paths(draft))
        assert draft.q is None
        assert draft.is_chain == (tree is None)
    assert 10 < larger < 50


def test_longer_matches_draft_more_and_the_likelier_continuation() -> None:
    text = [7, 1, 2, 3, 4, 5, 6, 8, 3, 9, 8, 3, 9, 0, 1, 2, 3]
    # After 3: 9 twice, 4 once. After 2 3: 4. A match of three tokens allows three.
    assert [*paths(drafted(SuffixDrafter(), text, 8))][-1] == (4, 5, 6)
    assert [*paths(drafted(SuffixDrafter(), text, 2))][-1] == (4, 5)
    assert [*paths(drafted(SuffixDrafter(max_tree_depth=5), text, 8))][-1] == (4, 5)
    # Without the longer matches the share of the likelier token decides.
    ended = [*text[:-3], 3]
    assert [*paths(drafted(SuffixDrafter(), ended, 8))] == [(9,)]
    assert drafted(SuffixDrafter(min_token_prob=0.7), ended, 8).sizes[0] == 0
    assert drafted(SuffixDrafter(min_score=0.7), ended, 8).sizes[0] == 0
    tree = SuffixDrafter(tree_nodes=5, max_spec_offset=9, min_token_prob=0.3)
    assert {(9,), (4,)} < set(paths(drafted(tree, ended, 2)))


def test_outputs_are_kept_and_the_oldest_go() -> None:
    model = longer_model(0.0)
    plain = Decoder(model, NoDrafter()).decode(PROMPTS, NEW).outputs
    drafter = SuffixDrafter(max_cached_requests=2)
    decoder = Decoder(model, drafter, gamma=6)
    ended: list[list[int]] = []
    first = decoder.decode(PROMPTS, NEW, on_end=lambda _, output: ended.append(output))
    assert first.outputs == plain
    # No prompt is kept.
    assert counts_of(drafter.outputs) == occurrences(ended[1:], 24)
    again = decoder.decode(PROMPTS[1:], NEW)
    assert again.outputs == plain[1:]
    assert again.counts.tokens_per_step > 1.2 * first.counts.tokens_per_step
    assert len(drafter.outputs) == 2
    alone = Decoder(model, SuffixDrafter(max_cached_requests=0), gamma=6)
    runs = [alone.decode(PROMPTS[1:], NEW) for _ in range(2)]
    assert runs[0].counts.to_dict() == runs[1].counts.to_dict()


def test_outputs_are_bound_by_their_tokens() -> None:
    model, ended = longer_model(0.0), []
    drafter = SuffixDrafter(max_cached_tokens=NEW)
    Decoder(model, drafter, gamma=6).decode(
        PROMPTS, NEW, on_end=lambda _, output: ended.append(output)
    )
    kept = []
    while ended and sum(map(len, kept)) + len(ended[-1]) <= NEW:
        kept.append(ended.pop())
    assert ended
    assert len(drafter.outputs) == len(kept)
    assert drafter.outputs.tokens == sum(map(len, kept)) > 0
    assert counts_of(drafter.outputs) == occurrences(kept, 24)


@pytest.mark.parametrize("name", ["ngram+suffix"])
def test_an_evaluation_does_not_time_answers_that_were_seen(name: str) -> None:
    target, prompts = tiny_target(), [[5, 17, 250, 9, 42], [7], [8, 9]]
    protocol = EvaluationProtocol(
        max_new_tokens=12, timed_prompts=1, timed_tokens=12, generate=False
    )
    found = evaluate(target, open_drafter(name, target), prompts, protocol)
    alone = Decoder(target.model, open_drafter(name, target), eos_token_ids=target.eos_token_ids)
    expected = alone.decode(prompts[:1], 12)
    (timed,) = found.drafted
    assert timed.outputs == expected.outputs
    assert timed.counts.to_dict() == expected.counts.to_dict()
    # Not forgotten, the answer is foreseen.
    assert alone.decode(prompts[:1], 12).counts.steps < expected.counts.steps


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("suffix:max_tree_depth=1", "max_tree_depth is 1; expected a whole number from 2 to 256"),
        (
            "suffix:max_tree_depth=257",
            "max_tree_depth is 257; expected a whole number from 2 to 256",
        ),
        ("suffix:min_token_prob=1.5", "of at most 1"),
        ("suffix:max_spec_factor=0", "allow no token"),
        ("suffix:tree_nodes=0", "tree_nodes is 0"),
        ("suffix:tree_nodes=1000000000", "from 1 to 1024"),
        ("lookahead:ngram=1", "ngram - 1 is 0"),
    ],
)
def test_settings_are_checked(spec: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        open_drafter(spec, tiny_target())


# --- other methods by settings --------------------------------------------------------------------

PAPERS = (Path(__file__).parents[1] / "docs" / "reference" / "papers.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("settings", "n", "text", "depth", "expected"),
    [
        # LLMA: n tokens match, and k are copied.
        ("ngram:min_n=n,max_n=n", 3, [7, 1, 2, 3, 4, 5, 9, 1, 2, 3], 2, {(4,), (4, 5)}),
        ("ngram:min_n=n,max_n=n", 3, [7, 1, 2, 3, 4, 5, 9, 2, 3], 2, set()),
        # LLMA from documents that are not in the prompt: the most frequent copy.
        ("min_n: n`, `max_n: n`, `tree_nodes: null", 3, [1, 2, 3], 2, {(6,), (6, 7)}),
        ("min_n: n`, `max_n: n`, `tree_nodes: null", 3, [0, 2, 3], 2, set()),
        # Lookahead by tries: all branches behind the match, at most n nodes.
        (
            "suffix:tree_nodes=n,max_spec_factor=0,max_spec_offset=n,min_token_prob=0",
            4,
            [1, 2, 3, 1, 2, 4, 1, 2],
            2,
            {(3,), (4,), (3, 1), (4, 1)},
        ),
        (
            "suffix:tree_nodes=n,max_spec_factor=0,max_spec_offset=n,min_token_prob=0",
            2,
            [1, 2, 3, 1, 2, 4, 1, 2],
            2,
            {(3,), (4,)},
        ),
    ],
)
def test_settings_that_reproduce_other_methods(
    settings: str,
    n: int,
    text: list[int],
    depth: int,
    expected: set[tuple[int, ...]],
    tmp_path: Path,
    target: Target,
) -> None:
    """As docs/reference/papers.md names them."""
    assert f"`{settings}`" in PAPERS
    spec = settings.replace("=n", f"={n}")
    if settings.startswith("min_n"):
        documents = [[1, 2, 3, 6, 7], [1, 2, 3, 8, 9], [5, 1, 2, 3, 6, 7]]
        options = RestOptions(n, n, tree_nodes=None)
        spec = str(tmp_path / "store")
        save_drafter(
            Path(spec),
            "rest",
            lambda path: write_rest(path, documents, options),
            target=target,
            provenance={},
        )
    assert set(paths(drafted(open_drafter(spec, target), text, depth))) == expected


# --- a datastore ----------------------------------------------------------------------------------


def store_of(directory: Path, documents: Sequence[Sequence[int]]) -> Datastore:
    directory.mkdir()
    write_datastore(directory, documents)
    return Datastore(directory)


@pytest.mark.parametrize("vocab", [3, 70_000])
def test_places_and_continuations_are_those_of_the_documents(tmp_path: Path, vocab: int) -> None:
    chance = random.Random(vocab)
    few = [0, 1, vocab - 1]
    documents = [[chance.choice(few) for _ in range(chance.randrange(40))] for _ in range(9)]
    store = store_of(tmp_path / "store", documents)
    assert store.tokens.dtype == (np.uint16 if vocab == 3 else np.uint32)
    for _ in range(200):
        end = [chance.choice(few) for _ in range(8)]
        hits = {
            n: [
                tuple([*text[i + n : i + n + 5], *[-1] * 5][:5])
                for text in documents
                for i in range(len(text) - n + 1)
                if text[i : i + n] == end[-n:]
            ]
            for n in range(2, 9)
        }
        longest = max((n for n in hits if hits[n]), default=0)
        count, first, last = store.longest(end, 2)
        assert (count, last - first) == (longest, len(hits.get(longest, ())))
        found = store.continuations(np.arange(first, last), count, 5).tolist()
        # What stands after the end of a document belongs to another one.
        cut = [tuple(itertools.takewhile(lambda t: t >= 0, row)) for row in found]
        assert sorted((*row, *[-1] * 5)[:5] for row in cut) == sorted(hits.get(longest, ()))
        assert found == sorted(found)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_suffixes_are_sorted_by_their_tokens(dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also part by part, as for a text that is larger than memory."""
    tokens = np.random.default_rng(0).integers(1, 3, 400).astype(dtype)
    tokens[100:180] = 1  # a run that is longer than what is sorted by
    tokens[[50, 51, 300, 399]] = 0
    (order,) = sorted_suffixes(tokens, 32, 1000)
    padded = np.pad(tokens, (0, 32))
    expected = sorted(np.flatnonzero(tokens), key=lambda at: padded[at : at + 32].tolist())
    assert order.tolist() == [int(at) for at in expected]
    parts = [part.tolist() for part in sorted_suffixes(tokens, 32, 60)]
    assert [place for part in parts for place in part] == order.tolist()
    assert len(parts) > 3
    # The run begins with one key, which is never parted.
    monkeypatch.setattr("decode.drafters.lookup.documents.free_bytes", lambda device: 0)
    with pytest.raises(UserError, match=r"places of the text that begin alike .* repeats"):
        list(sorted_suffixes(tokens, 32, 20))


def test_rest_drafts_the_most_frequent_nodes(tmp_path: Path) -> None:
    documents = [[1, 2, *[3] * 4], [1, 2, 3, 4], [1, 2, 3, 4, 5], [2, 9], [8, 2]]
    store = store_of(tmp_path / "store", documents)
    tree = paths(drafted(RestDrafter(store, RestOptions(tree_nodes=3)), [7, 1, 2], 4))
    assert [*tree] == [(3,), (3, 4), (3, 3)]
    count = occurrences(documents, 6)
    deep = paths(drafted(RestDrafter(store, RestOptions(tree_nodes=99)), [7, 1, 2], 4))
    assert {(1, 2, *path) for path in deep} == {
        s for s in count if s[:2] == (1, 2) and 3 <= len(s) <= 6
    }
    # Shorter matches, where asked for. Nothing follows the end of a document.
    short = RestOptions(min_n=1, max_n=1, tree_nodes=99)
    assert set(paths(drafted(RestDrafter(store, short), [7, 2], 1))) == {(3,), (9,)}
    path = RestDrafter(store).with_shape(SHAPES.make("chain"))
    assert [*paths(drafted(path, [7, 1, 2], 2))] == [(3,), (3, 4)]
    assert drafted(RestDrafter(store), [7, 1], 4).sizes[0] == 0
    with pytest.raises(UserError, match="no distributions for the shape static"):
        path.with_shape(SHAPES.make("static:widths=[2]"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Any:
    """A datastore stage's outcome, of a train split beside a test split."""
    context = stage_context(tmp_path_factory.mktemp("run"), target)
    context = with_examples(context, test=examples("test", 4))
    stage = make_stage("datastore", "store", tree_nodes=8)
    return context, stage, run_stage(context, stage)


def test_a_stage_writes_a_datastore_of_the_train_split(made: Any, target: Target) -> None:
    context, stage, outcome = made
    samples = context.corpus.samples("data")
    drafter = open_drafter(str(outcome.drafter), target)
    assert isinstance(drafter, RestDrafter)
    assert drafter.options == RestOptions(tree_nodes=8)
    stored = drafter.store.tokens.astype(int)
    documents = [part.tolist() for part in np.split(stored - 1, np.flatnonzero(stored == 0) + 1)]
    assert [document[:-1] for document in documents if document] == [s.tokens for s in samples]
    tokens = outcome.summary["tokens"]
    assert tokens == sum(len(s.tokens) for s in samples)
    # The plan counts what is stored, prompts included.
    plan = plan_stage(context, stage)
    memory = target.weight_bytes + SORT_BYTES * tokens
    assert (plan.tokens, plan.disk_bytes, plan.memory.total) == (tokens, 8 * tokens, memory)
    assert outcome.summary["tokens_per_second"] > 0
    # The texts stay those of plain decoding, and its own texts are foreseen.
    prompts = [samples[0].tokens[:9], samples[1].tokens[:5], [7]]
    eager = RestDrafter(drafter.store, RestOptions(min_n=1, tree_nodes=8))
    run = Decoder(target.model, eager, gamma=4).decode(prompts, 16)
    assert run.outputs == Decoder(target.model, NoDrafter()).decode(prompts, 16).outputs
    assert run.counts.drafted.sum() > 0
    text = samples[0].tokens
    assert tuple(text[9:13]) in paths(drafted(drafter, text[:9], 4))
    # It is not written again.
    before = (outcome.drafter / "tokens.npy").stat().st_mtime_ns
    assert run_stage(context, stage).summary["tokens"] == outcome.summary["tokens"]
    assert (outcome.drafter / "tokens.npy").stat().st_mtime_ns == before


def test_a_datastore_whose_making_was_killed_is_made_again(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kill comes when the tokens are written and their suffixes are not yet sorted."""
    context, _, outcome = made
    stage = make_stage("datastore", "killed", tree_nodes=8)

    def killed(*args: Any) -> Any:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("decode.drafters.lookup.documents.sorted_suffixes", killed)
        with pytest.raises(Killed):
            run_stage(context, stage)
    # A part of a datastore is never taken for one, and a complete one stays.
    assert not (context.directory / "killed" / "drafter").exists()
    again = run_stage(context, stage)
    for name in (TOKENS, SUFFIXES):
        assert (again.drafter / name).read_bytes() == (outcome.drafter / name).read_bytes()


def test_a_datastore_that_does_not_fit_is_refused(
    made: Any, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, _, outcome = made
    path = outcome.drafter
    other = replace(target, fingerprint=replace(target.fingerprint, vocab_sha256="0" * 64))
    with pytest.raises(UserError, match=r"the target of drafter .* has another vocabulary"):
        open_drafter(str(path), other)
    # Another padding of the same vocabulary is the same tokens.
    wider = replace(target, fingerprint=replace(target.fingerprint, vocab_size=320))
    assert isinstance(open_drafter(str(path), wider), RestDrafter)
    file = path / "suffixes.npy"
    data = file.read_bytes()
    file.write_bytes(data[:-4])
    with pytest.raises(CorruptArtifact) as caught:
        open_drafter(str(path), target)
    assert caught.value.file == "suffixes.npy"
    file.write_bytes(data)
    answers = GenerateConfig(name="answers", split="test")
    with pytest.raises(UserError, match="answers of answers to the test split"):
        make_stage("datastore", "store", answers, text="answers")
    with pytest.raises(ValidationError, match="less than or equal to 16"):
        make_stage("datastore", "store", max_n=17)
    stored = outcome.summary["tokens"]
    monkeypatch.setattr(
        "decode.drafters.lookup.documents.free_bytes", lambda device: SORT_BYTES * stored - 1
    )
    elsewhere, stage = replace(context, directory=tmp_path), make_stage("datastore", "other")
    for begin in (plan_stage, run_stage):
        with pytest.raises(UserError, match=r"sorting the suffixes of .* take less text"):
            begin(elsewhere, stage)
    assert not (tmp_path / "other" / "drafter").exists()
    with pytest.raises(UserError, match="the datastore is empty"):
        write_datastore(tmp_path, [[], []])


def test_an_evaluation_that_cannot_judge_a_datastore_is_refused(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "name": "x",
        "target": {"model": "m"},
        "data": {"train": "a.jsonl", "test": "b.jsonl"},
        "stages": [{"name": "store", "kind": "datastore"}],
    }

    def config(**evaluation: Any) -> None:
        validate_config(values | {"evaluation": evaluation}, base_dir=tmp_path)

    with pytest.raises(UserError, match="has no distributions for a shape"):
        config(shape="static:widths=[2]")
    with pytest.raises(UserError, match="works only on chains"):
        config(policy="confidence")
    config(policy="confidence", shape="chain")


# --- lookahead ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "ngram", "guesses"), [(4, 4, 3), (1, 3, 2), (5, 2, 2)])
def test_ngrams_are_the_targets_continuations_of_the_window(
    window: int, ngram: int, guesses: int
) -> None:
    """Each column's newest token is the target's argmax after the text and the column's path,
    computed by plain forwards."""
    model = longer_model(0.0)
    drafter = LookaheadDrafter(window, ngram, guesses)
    checked = 0

    def argmax_after(text: Sequence[int]) -> int:
        with torch.inference_mode():
            return int(model(torch.tensor([list(text)])).logits[0, -1].argmax())

    windows: list[np.ndarray] = []

    def observer(done: Verification) -> None:
        nonlocal checked
        row = drafter._rows[0]
        before, now = windows[-1] if windows else None, row.window
        assert now is not None
        if before is not None and (now[:-1] == before[1:]).all():
            length = int(done.lengths[0])
            text = done.contexts.tokens[0, :length].tolist()
            for column in range(window):
                path = [*before[0, 1 : column + 1], *before[1:, column]]
                newest = argmax_after([*text, *path])
                assert now[-1, column] == newest
                first, *rest = [int(t) for t in (*before[:, column], newest)]
                assert tuple(rest) in row.pool[first] or window > guesses
                checked += 1
        assert all(len(known) <= guesses for known in row.pool.values())

    class Watching(LookaheadDrafter):
        def draft(self, *args: Any) -> Draft:
            draft = super().draft(*args)
            row = self._rows[0]
            assert row.window is not None
            windows.append(row.window.copy())
            return draft

    drafter = Watching(window, ngram, guesses)
    decoder = Decoder(model, drafter, observers=[observer])
    run = decoder.decode([PROMPTS[2]], NEW)
    assert run.outputs == Decoder(model, NoDrafter()).decode([PROMPTS[2]], NEW).outputs
    assert checked > 3 * window
    assert run.counts.accepted.sum() > 5
    assert run.steps[0].width <= 1 + drafter.max_nodes(4)
