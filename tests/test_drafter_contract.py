"""What every registered drafter promises, checked for one of each kind.

`test_heads_contract` has the kinds of heads.

A new drafter is under this contract when it has a recipe in `tests/contract.py`. Without one the
tests fail with its name. Sampled text has exactly the target's distribution for each pairing of a
drafter, what it drafts and a rule that is listed here; the rules alone are enumerated in
`test_rules`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from decode.drafters import DRAFTERS, Drafter
from decode.drafters.lookup.rest import RestOptions, write_rest
from decode.drafters.pard import mark_parallel
from decode.model.loading import Target
from decode.opening.combinations import COMBINATIONS
from decode.opening.directory import open_drafter, save_drafter
from decode.shapes import SHAPES
from heads.kinds import HEADS
from tests.contract import (
    CASES,
    HEAD_OPTIONS,
    HEAD_RECIPES,
    NEW,
    PROMPTS,
    RECIPES,
    case_of,
    check_forgets,
    check_greedy_texts_survive_everything,
    check_law,
    check_rows_are_their_own,
    check_stored,
    decoder,
    name_of,
    recipe,
)
from tests.lossless import LONGER, more_texts
from tests.other_tokenizers import shuffled, with_rows
from tests.tiny import VOCAB, padded, save_tiny, tiny_model, tiny_target, tiny_tokenizer

GROUPS_WITH_HEADS = [
    "heads, then lookup",
    "medusa, then a model",
    "heads with windows",
    "blocks with windows",
]
# What differs from `tree` or another kind in the shape alone: `test_shapes` has the rows of shapes.
OTHER_SHAPES = (
    "independent",
    "the likeliest paths",
    "two chains",
    "planned tree",
    "measured tree",
    "tree of changing layers",
    "pairs of shared tokens",
    "chain of a datastore",
    "vertical in blocks",
    "horizontal models",
    "merged models",
)
# Made of the same drafters as others that are not here.
OTHER_GROUPS = (
    "skip tree",
    "parallel tree",
    "tree of few slots",
    "vertical of three",
    "vertical of few slots",
    "lookup, then skip",
    "lookup, then few slots",
    "lookahead and parallel",
    "skip, then parallel",
)
kinds = pytest.mark.parametrize(
    "kind",
    [
        *(kind for kind in RECIPES if kind not in OTHER_SHAPES + OTHER_GROUPS),
        *GROUPS_WITH_HEADS,
        *(pytest.param(kind, marks=pytest.mark.thorough) for kind in OTHER_GROUPS),
    ],
)


def test_every_drafter_has_a_recipe() -> None:
    """Without one, nothing below tests it."""
    built = {name_of(make(LONGER)) for make in RECIPES.values()}
    lacking = [
        name
        for name in (*DRAFTERS, *COMBINATIONS)
        if name not in HEAD_OPTIONS and name not in built
    ]
    assert not lacking, f"no recipe in tests/contract.py builds {lacking}: add a line to RECIPES"
    trained = [name for name in DRAFTERS if DRAFTERS[name].trained and name not in HEADS]
    lacking = [name for name in trained if name not in STORED]
    assert not lacking, f"no function in STORED writes a directory of {lacking}: add one"
    assert set(GROUPS_WITH_HEADS) <= set(HEAD_RECIPES)


@kinds
def test_rows_are_their_own(kind: str) -> None:
    case = case_of(kind)
    check_rows_are_their_own(lambda: recipe(kind, case), case)


@kinds
def test_greedy_texts_survive_everything(kind: str) -> None:
    case = case_of(kind)
    check_greedy_texts_survive_everything(lambda: recipe(kind, case), case)


@pytest.mark.parametrize(
    "kind", ["chain", "texts of all rows", "longest match", "suffix", "changing layers"]
)
def test_what_was_learnt_is_forgotten(kind: str) -> None:
    case = case_of(kind)
    check_forgets(lambda: recipe(kind, case), case)


@pytest.mark.parametrize("shape", ["chain", "static:widths=[2,2,1]", "dynamic:width=2,nodes=6"])
@pytest.mark.parametrize("kind", ["skip", "pass", "kangaroo"])
def test_drafts_through_the_target_leave_no_trace_in_its_slots(kind: str, shape: str) -> None:
    """A NaN would spoil its row, although its slot is masked."""
    drafter: Any = recipe(kind)
    which = decoder(drafter.with_shape(SHAPES.make(shape)))
    draft, drafted = which.drafter.draft, []

    def watched(*args: Any) -> Any:
        before = [x.clone() for store in which.lm.slots._stores for x in store._tensors]
        drafted.append(draft(*args))
        now = [x for store in which.lm.slots._stores for x in store._tensors]
        assert all(torch.equal(*pair) for pair in zip(now, before, strict=True))
        return drafted[-1]

    with mock.patch.object(which.drafter, "draft", watched):
        which.decode(PROMPTS, NEW)
    assert sum(made.sizes.any() for made in drafted) > 3


# Rule, drafter and case: each case, and each way in which a draft is made: by a model, by the
# target's own layers, by lookup, over two vocabularies, by several drafters. `test_lossless` has
# each rule.
LAWS = [
    ("speculative", "chain", "through transformers"),
    ("speculative", "first layers", "deeper"),
    ("block", "vertical", "penalised"),
    ("speculative", "text", "penalised"),
    ("traversal", "parallel tree", "plain"),
    ("traversal", "merged with lookup", "processed"),
    ("speculative", "grammar", "constrained"),
]
# Other drafters, each with one rule: what a rule does with a q is enumerated, whatever made it.
MORE_LAWS = [
    ("speculative", "lookup or horizontal", "plain"),
    ("speculative", "changing layers", "deeper"),
    ("block", "shared tokens", "penalised"),
    ("multi_round", "merged models", "plain"),
    ("traversal", "the likeliest paths", "plain"),
    ("spectr", "two chains", "plain"),
    ("traversal", "tree of few slots", "plain"),
    ("block", "horizontal models", "penalised"),
    ("multi_round", "suffix tree", "plain"),
    ("traversal", "skip tree", "plain"),
    ("block", "vertical in blocks", "plain"),
    ("traversal", "vertical of three", "plain"),
    ("speculative", "in turn", "plain"),
    ("speculative", "routed", "plain"),
    ("speculative", "texts of all rows", "plain"),
    ("traversal", "pairs of shared tokens", "plain"),
    ("traversal", "tree", "constrained"),
    ("multi_round", "datastore", "plain"),
    ("exact", "lookahead", "penalised"),
    ("multi_round", "planned tree", "plain"),
    ("traversal", "measured tree", "plain"),
    ("speculative", "skip", "plain"),
    ("speculative", "few slots", "plain"),
    ("coupled", "vertical", "penalised"),
    ("speculative", "longest match", "plain"),
    ("speculative", "ngram", "penalised"),  # it drafts no end, which is in no text
    ("block", "chain", "plain"),
]


@pytest.mark.slow
@more_texts(6)
@pytest.mark.parametrize(
    ("rule", "drafter", "case"),
    [*LAWS, *(pytest.param(*law, marks=pytest.mark.thorough) for law in MORE_LAWS)],
)
def test_ragged_texts_of_many_rounds(rule: str, drafter: str, case: str, times: int) -> None:
    """Prompts of different lengths, drafts four deep, and texts that end inside a block."""
    rows = 3_000 if case in ("processed", "constrained") else 4_000
    if drafter in ("text", "shared tokens", "grammar"):  # each text takes long
        rows = 2_500
    check_law(recipe(drafter, CASES[case]), rule, CASES[case], rows * times)


# --- directories ----------------------------------------------------------------------------------


def _write_model(directory: Path, model: Any, tokenizer: Any) -> None:
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _parallel(directory: Path) -> None:
    model = padded(tiny_model("llama", layers=1), VOCAB + 8, std=0.5)
    mark_parallel(model.config, VOCAB)
    _write_model(directory, model, tiny_tokenizer())


def _shared(directory: Path) -> None:
    tokenizer, order = shuffled()
    _write_model(directory, with_rows(tiny_model("llama", layers=1), order), tokenizer)


def _datastore(directory: Path) -> None:
    texts = torch.randint(3, VOCAB, (9, 20), generator=torch.Generator().manual_seed(0))
    write_rest(directory, texts.tolist(), RestOptions(min_n=1))


# What writes the files of a directory of each kind.
STORED: dict[str, Callable[[Path], object]] = {
    "small_lm": lambda path: save_tiny(path, layers=1),
    "pard": _parallel,
    "shared_vocabulary": _shared,
    "rest": _datastore,
}


@pytest.mark.parametrize("name", STORED)
def test_a_directory_is_opened_as_what_was_saved(name: str, tmp_path: Path) -> None:
    target: Target = tiny_target(vocab=VOCAB + 8) if name == "pard" else tiny_target()
    save_drafter(tmp_path / "drafter", name, STORED[name], target=target, provenance={})
    (tmp_path / "files").mkdir()
    STORED[name](tmp_path / "files")
    written: Drafter = DRAFTERS[name].load(tmp_path / "files", target, dtype="float32")
    stored = open_drafter(str(tmp_path / "drafter"), target)
    assert type(stored) is type(written) is DRAFTERS[name]
    prompts = [[5, 17, 250, 9, 42], [7], [30] * 9]
    check_stored(written, stored, target.model, prompts)
