"""Heads that are handed on as a directory of ours, and the drafter that comes with draftsmith."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from decode.base.artifact import verify_directory
from decode.base.errors import UserError
from decode.loop.decoding import Decoder
from decode.model.loading import Target
from decode.opening.directory import describe_drafter, open_drafter, split_window
from decode.opening.shipped import SHIPPED, shipped_drafter, shipped_names
from draftsmith.cli.chat import default_drafter
from draftsmith.export import ExportOptions
from draftsmith.export.export_directory import check_export, export_drafter
from draftsmith.export.formats import FORMATS
from draftsmith.export.model_card import drafter_card
from draftsmith.export.trained_drafter import target_hub_id
from heads.heads_directory import SAMPLE, WEIGHTS, read_heads, stored_options
from tests.export import FEW, KEPT, PROMPTS, edit_weights, make_heads, needs_few_rows, save_target
from tests.tiny import real_target

EAGLE = {"type": "eagle1", "depth": 3}
ROOT = Path(__file__).parent.parent
SHIPPED_NAME = "eagle1-smollm2-135m"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return save_target(tmp_path_factory.mktemp("target") / "target")


def test_the_export_is_a_smaller_drafter_directory(tmp_path: Path, target: Target) -> None:
    make_heads(tmp_path / "drafter", target, EAGLE, KEPT, moved=0.05)
    options = ExportOptions(dtype="bfloat16", licence="CC0-1.0", repository="org/name")
    asked = replace(FEW, question='What does "yes: no" mean?')
    export_drafter(tmp_path / "drafter", "draftsmith", tmp_path / "out", options, measuring=asked)
    record = check_export(tmp_path / "out")
    assert record["facts"]["kept"] == len(KEPT)
    before, after = (load_file(tmp_path / name / WEIGHTS) for name in ("drafter", "out"))
    assert before.keys() == after.keys()
    assert torch.equal(before[SAMPLE], after[SAMPLE])
    for name in before.keys() - {SAMPLE}:
        if before[name].is_floating_point():
            assert after[name].dtype == torch.bfloat16
        assert torch.equal(after[name], before[name].to(after[name].dtype))
    # Our loop opens it as any drafter directory.
    opened: Any = open_drafter(str(tmp_path / "out"), target)
    assert torch.equal(opened.heads.vocabulary, KEPT)
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.license == "cc0-1.0"
    (example,) = card.data.widget
    assert example["text"] == 'What does "yes: no" mean?'
    assert example["output"]["text"] == record["example"]["text"] != ""
    assert "hf download org/name" in card.text
    alone = drafter_card(record | {"repository": "out"})
    assert "hf download" not in alone
    assert "--drafter ./out" in alone


def test_a_window_and_its_sinks_stay(tmp_path: Path, target: Target) -> None:
    make_heads(tmp_path / "drafter", target, EAGLE | {"window": 8, "sinks": 2})
    export_drafter(tmp_path / "drafter", "draftsmith", tmp_path / "out", ExportOptions())
    assert stored_options(tmp_path / "out") == stored_options(tmp_path / "drafter")


def test_a_damaged_export_is_refused(tmp_path: Path, target: Target) -> None:
    make_heads(tmp_path / "drafter", target, EAGLE)
    export_drafter(tmp_path / "drafter", "draftsmith", tmp_path / "out", ExportOptions())
    assert FORMATS["draftsmith"].problems(tmp_path / "out") == []
    edit_weights(lambda weights: weights.pop(SAMPLE))(tmp_path / "out")
    (problem,) = FORMATS["draftsmith"].problems(tmp_path / "out")
    assert f"no {SAMPLE}" in problem
    with pytest.raises(UserError, match=WEIGHTS):  # the manifest has its hash
        check_export(tmp_path / "out")


def test_heads_with_nan_are_refused_by_the_name_of_the_weight(
    tmp_path: Path, target: Target
) -> None:
    path = tmp_path / "drafter"
    make_heads(path, target, EAGLE, moved=0.05)
    read_heads(path, target)

    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights["fc.weight"][3, 2] = torch.nan

    edit_weights(spoil)(path)
    with pytest.raises(UserError, match=r"weights of .* are NaN or infinite: fc\.weight;"):
        read_heads(path, target)


def test_a_drafter_opens_with_weights_in_bytes(tmp_path: Path, target: Target) -> None:
    """The texts are the same, nearly as much is accepted, and a quarter is read of float32."""
    needs_few_rows(torch.float32)
    make_heads(tmp_path / "drafter", target, EAGLE, moved=0.02)
    path = str(tmp_path / "drafter")
    texts, accepted, read = [], [], []
    make_heads(tmp_path / "stored", target, EAGLE, moved=0.02, weights="int8")
    stored = str(tmp_path / "stored")
    for spec in (path, f"{path}:weights=int8", f"{path}:weights=int8:window=40", stored):
        drafter: Any = open_drafter(spec, target)
        decoded = Decoder(target.model, drafter, gamma=3).decode(PROMPTS, 12)
        texts.append(decoded.outputs)
        accepted.append(int(decoded.counts.accepted.sum()))
        lean = drafter.heads.layers[0]._lean[0]
        read.append(sum(x.blocks[0].data.nbytes for x in (lean.qkv, lean.out, lean.down)))
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert accepted[0] > 20
    assert all(abs(count - accepted[0]) < 0.1 * accepted[0] for count in accepted)
    assert read[0] / 4 < read[1] == read[2] == read[3] < 0.3 * read[0]
    with pytest.raises(UserError, match=r"weights is 'int4' after .* expected int8"):
        open_drafter(f"ngram+{path}:weights=int4", target)
    with pytest.raises(UserError, match="no product of ngram can read weights of one byte"):
        open_drafter("ngram:weights=int8", target)


def test_names_of_drafters_that_come_along() -> None:
    assert SHIPPED_NAME in shipped_names()
    assert shipped_drafter(f"embedded:{SHIPPED_NAME}") == SHIPPED / SHIPPED_NAME
    assert shipped_drafter("embedded:smollm2-135m") is None  # a target, which can draft too
    assert shipped_drafter("runs/x/drafter") is None
    assert shipped_drafter(f"embedded:{SHIPPED_NAME}:window=64") is None
    assert split_window(f"embedded:{SHIPPED_NAME}:window=64")[0] == f"embedded:{SHIPPED_NAME}"
    with pytest.raises(UserError, match=rf"no embedded:eagle1-smollm2;.*{SHIPPED_NAME}"):
        shipped_drafter("embedded:eagle1-smollm2")


@pytest.mark.parametrize("name", shipped_names())
def test_what_comes_along_is_small_intact_and_described(name: str) -> None:
    directory = SHIPPED / name
    verify_directory(directory)
    assert sum(file.stat().st_size for file in directory.iterdir()) < 10e6
    record = check_export(directory)
    assert describe_drafter(directory)["provenance"]["steps"] > 0
    (measured,) = (row for row in record["acceptance"] if row["where"] == "this export")
    assert (directory / "README.md").read_text("utf-8") == drafter_card(record)
    card = ModelCard.load(directory / "README.md")
    hub_id = target_hub_id(record["drafter"]["target"]["name"])
    assert (card.data.license, card.data.base_model) == ("apache-2.0", hub_id)
    assert f"| {measured['acceptance_rate']:.3g} |" in card.text
    assert [row for row in record["acceptance"] if row["timed_prompts"]]
    assert all(text["answers"] > 0 for text in record["training"]["texts"])
    (config,) = [word for word in record["training"]["command"] if word.endswith(".yaml")]
    assert (ROOT / config).is_file()
    # Heads are refused for other weights than those of the target that they were trained on.
    assert f"--target {record['drafter']['target']['name']} --drafter embedded:{name}" in card.text


@pytest.mark.real
def test_the_drafter_that_comes_along_drafts_for_its_target(tmp_path: Path) -> None:
    target = real_target()
    spec, _, why = default_drafter(target, tmp_path)
    assert spec == f"ngram+embedded:{SHIPPED_NAME}", why
    tokenizer = target.tokenizer
    questions = ["Why is the sky blue?", "Write a short poem about a cat."]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for question in questions
    ]
    eos = target.eos_token_ids
    drafted, plain = (
        Decoder(target.model, open_drafter(spec, target), gamma=4, eos_token_ids=eos).decode(
            prompts, 32
        )
        for spec in (f"embedded:{SHIPPED_NAME}", "none")
    )
    assert drafted.outputs == plain.outputs
    accepted, steps = (
        sum(int(step.accepted.sum()) for step in drafted.steps),
        sum(len(step.accepted) for step in drafted.steps),
    )
    assert accepted / steps > 0.4, json.dumps([accepted, steps])
