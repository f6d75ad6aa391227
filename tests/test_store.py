"""Drafters as directories: what is saved comes back, and what does not fit is refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from decode.base.artifact import CorruptArtifact, write_directory
from decode.base.errors import UserError
from decode.drafters import NoDrafter
from decode.drafters.draft_vocabulary import reduce_output, save_with_vocabulary
from decode.drafters.lookup.ngram import NgramDrafter, StoreDrafter
from decode.drafters.several.combined import CompositeDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.loop.decoding import Decoder
from decode.model.loading import Target
from decode.opening import directory
from decode.opening.directory import DRAFTER_FILE, describe_drafter, open_drafter, save_drafter
from decode.shapes import SHAPES
from decode.text import SpeculativeGenerator
from draftsmith.cli.command import Loading
from tests.tiny import save_tiny, tiny_model, tiny_target, tiny_tokenizer

PROMPTS = [[5, 17, 250, 9, 42], [7]]
DRAFTER: dict[str, Any] = {"layers": 1, "seed": 7}


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def _write(directory: Path) -> None:
    save_tiny(directory, **DRAFTER)


@pytest.fixture
def saved(tmp_path: Path, target: Target) -> Path:
    path = tmp_path / "drafters" / "small"
    save_drafter(
        path, "small_lm", _write, target=target, provenance={"steps": 3, "data": ["a.jsonl"]}
    )
    return path


def test_a_directory_says_what_was_saved(saved: Path, target: Target) -> None:
    described = describe_drafter(saved)
    assert described["kind"] == "small_lm"
    assert described["target"]["name"] == target.name
    assert described["provenance"] == {"steps": 3, "data": ["a.jsonl"]}


def test_a_reduced_vocabulary_comes_back(tmp_path: Path, target: Target) -> None:
    ids = torch.arange(3, 300, 2)
    lm = tiny_model("llama", **DRAFTER)
    vocabulary = reduce_output(lm, ids)

    def write(directory: Path) -> None:
        save_with_vocabulary(lm, vocabulary, directory)
        tiny_tokenizer().save_pretrained(directory)

    save_drafter(tmp_path / "a", "small_lm", write, target=target, provenance={})
    drafter = open_drafter(str(tmp_path / "a"), target)
    assert isinstance(drafter, SmallLMDrafter)
    assert drafter.vocabulary is not None
    assert torch.equal(drafter.vocabulary, ids)
    rows = drafter.lm.model.get_output_embeddings().weight
    assert torch.equal(rows, lm.get_output_embeddings().weight)
    run = Decoder(target.model, drafter, gamma=3).decode(PROMPTS, 16)
    assert run.outputs == Decoder(target.model, NoDrafter()).decode(PROMPTS, 16).outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_is_the_targets_or_as_asked(
    saved: Path, target: Target, dtype: torch.dtype
) -> None:
    drafter = open_drafter(str(saved), target, dtype=dtype)
    assert isinstance(drafter, SmallLMDrafter)
    assert drafter.lm.model.dtype == dtype


def test_names_of_kinds(target: Target) -> None:
    assert isinstance(open_drafter("none", target), NoDrafter)
    assert isinstance(open_drafter("ngram", target), NgramDrafter)
    with pytest.raises(UserError, match="is a kind of trained drafter; give the directory"):
        open_drafter("small_lm", target)


def test_options_of_the_untrained_and_several_in_turn(target: Target) -> None:
    store = open_drafter("store:capacity=7,top_k=2", target)
    assert isinstance(store, StoreDrafter)
    assert (store.store.capacity, store.top_k) == (7, 2)
    both = open_drafter("ngram:max_n=4+none", target)
    assert isinstance(both, CompositeDrafter)
    first, last = both.drafters
    assert isinstance(first, NgramDrafter)
    assert (first.min_n, first.max_n) == (1, 4)
    assert isinstance(last, NoDrafter)
    with pytest.raises(UserError, match=r"no option 'maxn'.*Did you mean \"max_n\""):
        open_drafter("ngram:maxn=4", target)
    with pytest.raises(UserError, match=r"expected 1 ≤ min_n ≤ max_n"):
        open_drafter("ngram:max_n=0", target)


def test_a_drafter_for_another_vocabulary_is_refused(
    saved: Path, tmp_path: Path, target: Target
) -> None:
    other = replace(target, fingerprint=replace(target.fingerprint, vocab_sha256="0" * 64))
    with pytest.raises(UserError, match=r"the target of drafter .*small.* another vocabulary") as e:
        open_drafter(str(saved), other)
    # What the drafter was made for is found, what is in use is expected.
    assert "expected 000000000000…" in str(e.value)
    path = save_tiny(tmp_path / "hf", **DRAFTER)
    with pytest.raises(UserError, match=r"drafter .*hf has another vocabulary .*expected 00000000"):
        open_drafter(str(path), other)


@pytest.mark.parametrize("rows", [310, 320])
def test_a_drafter_may_be_padded_to_another_size(saved: Path, tmp_path: Path, rows: int) -> None:
    """As a directory of ours, made for a target of another size, and as a plain model."""
    target = tiny_target(vocab=315)
    plain = Decoder(target.model, NoDrafter()).decode(PROMPTS, 16)
    for path in (saved, save_tiny(tmp_path / "hf", vocab=rows, **DRAFTER)):
        drafter = open_drafter(str(path), target)
        assert isinstance(drafter, SmallLMDrafter)
        assert (drafter.vocab_size, drafter.tokens) == (315, 300)
        drafter = drafter.with_shape(SHAPES.make("static:widths=[2,1]"))
        run = Decoder(target.model, drafter).decode(PROMPTS, 16)
        assert run.outputs == plain.outputs
        assert run.counts.drafted.sum() > 0
    # A model as such has no tokenizer to compare.
    with pytest.raises(UserError, match=r"vocabulary of 300 tokens, .*the drafter by its name"):
        SpeculativeGenerator(target.model, target.tokenizer, tiny_model("llama", layers=1))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", DRAFTER_FILE])
def test_damage_is_refused_and_named(saved: Path, target: Target, name: str) -> None:
    """`test_artifact` has every kind of damage."""
    file = saved / name
    data = file.read_bytes()
    file.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    with pytest.raises(CorruptArtifact) as caught:
        open_drafter(str(saved), target)
    assert caught.value.file == name


def rewrite_description(path: Path, edit: dict[str, Any]) -> None:
    """Edit a drafter's description and make a manifest that agrees with it."""
    description = json.loads((path / DRAFTER_FILE).read_text("utf-8")) | edit
    kept = {key: value for key, value in description.items() if value is not None}

    def fill(directory: Path) -> None:
        _write(directory)
        (directory / DRAFTER_FILE).write_text(json.dumps(kept), "utf-8")

    write_directory(path, fill)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"kind": "smal_lm"}, 'unknown drafter .smal_lm.*Did you mean "small_lm"'),
        ({"kind": "of_heads"}, "unknown drafter .of_heads.*import open_drafter from there"),
        ({"kind": "ngram"}, "not trained"),
        ({"format": 2}, "has format 2; .* reads format 1"),
        ({"format": None}, "is not a drafter description"),
        ({"kind": None}, "is not a drafter description"),
        ({"target": None}, "is not a drafter description"),
        ({"target": {"fingerprint": {"vocab_size": 300}}}, "not a tokenizer fingerprint"),
    ],
)
def test_descriptions_that_cannot_be_read(
    saved: Path, target: Target, edit: dict[str, Any], said: str
) -> None:
    rewrite_description(saved, edit)
    with pytest.raises(UserError, match=said):
        open_drafter(str(saved), target)


def test_what_is_no_drafter(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="neither a drafter directory nor a model directory"):
        open_drafter(str(tmp_path / "empty"), target)
    # A run has a config.json too.
    drafters = [tmp_path / f"run/stages/0{i}-heads/drafter" for i in range(2)]
    for drafter in drafters:
        drafter.mkdir(parents=True)
        (drafter / DRAFTER_FILE).write_text("{}", "utf-8")
    (tmp_path / "run/config.json").write_text("{}", "utf-8")
    with pytest.raises(UserError, match=f"holds 2; name one of them: {drafters[0]}, {drafters[1]}"):
        open_drafter(str(tmp_path / "run"), target)
    # No hub is asked for a name that is nearly one of ours.
    with monkeypatch.context() as patch:
        patch.setattr(directory, "load_model_and_tokenizer", None)
        with pytest.raises(UserError, match=r"no drafter 'ngran:max_n=3'.*Did you mean \"ngram\""):
            open_drafter("ngran:max_n=3", target)
    # Commands say so before they load the target.
    for name, said in (
        (f"ngram+{tmp_path / 'empty'}", "neither a drafter directory"),
        (f"ngram++{tmp_path / 'run'}", "holds 2; name one of them"),
        ("ngran", 'Did you mean "ngram"'),
        (f"ngram+{drafters[0]}", "no-target"),
        ("ngram:max_n=2", "no-target"),
    ):
        with pytest.raises(UserError, match=said):
            Loading(target="./no-target").load(name)
    with pytest.raises(UserError, match="does not exist"):
        open_drafter(str(tmp_path / "none" / "such"), target)
