"""Exports of heads, where they differ from what all layouts promise (`test_export_contract`)."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from decode.base.errors import UserError
from decode.model.loading import Target, load_target
from draftsmith.auditing.verify_export import engine_for_drafter, verify_export
from draftsmith.export import ExportOptions
from draftsmith.export.engine_kinds import ENGINES
from draftsmith.export.export_directory import Measuring, check_export, export_drafter
from draftsmith.export.formats.eagle3_layer import is_speculators_config, speculators_config
from heads.heads_module import Heads
from tests.export import (
    DSPARK,
    EAGLE1,
    FEW,
    KEPT,
    MEDUSA,
    NEWER3,
    P_EAGLE,
    PROMPTS,
    SHAPE,
    assert_same_counts,
    exported,
    make_heads,
    needs,
    reloaded,
    save_target,
    task,
)
from tests.tiny import save_tiny
from train.measure.tree_acceptance import probe


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return save_target(tmp_path_factory.mktemp("target") / "target")


def logits(heads: Heads, features: torch.Tensor) -> torch.Tensor:
    """[n, K, V'] of features [n, H]."""
    heads_: Any = heads
    found: torch.Tensor = heads.output.logits(heads_.states(features, range(1, heads.depth + 1)))
    return found


@pytest.mark.parametrize("output", ["own", "target"])
def test_a_reduced_vocabulary_is_filled_from_the_target(
    output: str, tmp_path: Path, target: Target
) -> None:
    options = MEDUSA | {"output": output, "layers": 2}
    heads = make_heads(tmp_path / "drafter", target, options, KEPT, moved=0.1)
    export_drafter(tmp_path / "drafter", "tgi", tmp_path / "out", measuring=FEW)
    found = reloaded(tmp_path / "out", target).heads
    features = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = logits(heads, features), logits(found, features)
        states = heads.states(features, range(1, 4))  # type: ignore[operator]
        whole = target.model.get_output_embeddings()(states)
    torch.testing.assert_close(theirs[..., KEPT], ours, rtol=0, atol=1e-5)
    torch.testing.assert_close(theirs[..., 1::2], whole[..., 1::2], rtol=0, atol=1e-5)
    facts = check_export(tmp_path / "out")["facts"]
    assert facts["filled_from"] == "the target's output layer"
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert ("original_lm_head" in config) == (output != "own")


def test_what_stands_in_the_readme(tmp_path: Path, target: Target) -> None:
    out = exported(tmp_path, target, MEDUSA, KEPT)
    card = (out / "README.md").read_text("utf-8")
    assert '"method": "medusa"' in card
    assert '"num_speculative_tokens": 3' in card
    assert "text-generation-launcher" in card
    assert "3 Medusa heads" in card
    assert "150 tokens of the vocabulary" in card
    config = json.loads((out / "config.json").read_text("utf-8"))
    assert config["base_model_name_or_path"] == "target"


def test_heads_with_a_tree_are_measured_in_chains(tmp_path: Path, target: Target) -> None:
    make_heads(tmp_path / "drafter", target, MEDUSA, tree=probe(2, 3))
    measuring = Measuring(lambda target: PROMPTS[:8], max_new_tokens=24)
    export_drafter(tmp_path / "drafter", "vllm", tmp_path / "out", measuring=measuring)
    before, after = check_export(tmp_path / "out")["acceptance"]
    same = ("drafted", "draft_efficiency", "tokens_per_step")
    assert [before[key] for key in same] == [after[key] for key in same]
    assert before["drafted"] > 0


def test_an_export_for_another_target_or_deeper_drafts(tmp_path: Path, target: Target) -> None:
    out = exported(tmp_path, target, MEDUSA)
    save_tiny(tmp_path / "tuned", seed=5, **SHAPE)
    tuned = ExportOptions(target=str(tmp_path / "tuned"))
    with pytest.raises(UserError, match="other weights"):
        export_drafter(tmp_path / "drafter", "vllm", tmp_path / "again", tuned)
    save_tiny(tmp_path / "narrow")
    narrow = load_target(str(tmp_path / "narrow"))
    with pytest.raises(UserError, match=r"hidden size 64 and 300 tokens, but the target .* 32"):
        reloaded(out, narrow)
    installed = pytest.MonkeyPatch()
    with installed.context() as patch:
        patch.setattr(type(ENGINES["vllm"]), "version", lambda self, python: "0.32")
        with pytest.raises(UserError, match=r"gamma is 4, but .* drafts at most 3 tokens"):
            verify_export("vllm", task(target, out, gamma=4))


@pytest.mark.engine
@pytest.mark.thorough
def test_vllm_ends_texts_as_our_loop_does(tmp_path: Path, target: Target) -> None:
    """With a token that texts are full of as their end, counts behind the end included."""
    needs("vllm")
    GenerationConfig(eos_token_id=169).save_pretrained(target.name)
    which = load_target(target.name)
    assert 169 in which.eos_token_ids
    out = exported(tmp_path, which, MEDUSA)
    assert_same_counts(verify_export("vllm", task(which, out)))


def test_eagle1_drafts_a_whole_vocabulary(tmp_path: Path, seven: Target) -> None:
    """vLLM has the target's output layer for it and nothing else."""
    make_heads(tmp_path / "drafter", seven, EAGLE1, KEPT)
    export_drafter(tmp_path / "drafter", "vllm", tmp_path / "out", measuring=FEW)
    assert reloaded(tmp_path / "out", seven).heads.vocabulary is None
    assert check_export(tmp_path / "out")["facts"]["filled_from"] == "the target's output layer"


def test_options_that_an_engine_does_not_read_are_refused_before_it_starts(
    tmp_path: Path, seven: Target
) -> None:
    """Of a drafter, and of its export, which other engines read."""
    make_heads(tmp_path / "drafter", seven, NEWER3)
    export_drafter(tmp_path / "drafter", "eagle3", tmp_path / "out")
    for refused in (
        lambda: engine_for_drafter("openvino", tmp_path / "drafter", "eagle3"),
        lambda: verify_export("openvino", task(seven, tmp_path / "out")),
    ):
        with pytest.raises(UserError, match=r"fc_norm and norm_output, which openvino .* vllm$"):
            refused()


def test_vllm_reads_dspark_in_its_newer_runner_only(tmp_path: Path, spare: Target) -> None:
    make_heads(tmp_path / "dspark", spare, DSPARK)
    export_drafter(tmp_path / "dspark", "vllm", tmp_path / "out")
    with pytest.raises(UserError, match=r"this export is dspark: .*newer runner, .*never ran here"):
        verify_export("vllm", task(spare, tmp_path / "out"))


def test_a_target_whose_config_names_no_architecture(seven: Target) -> None:
    """As one that was read from a GGUF file."""
    model = copy.deepcopy(seven.model)
    model.config.architectures = None
    job: Any = SimpleNamespace(
        gamma=3, target_name="target", loaded_target=replace(seven, model=model)
    )
    config = speculators_config("dflash", job)
    assert is_speculators_config(config, "dflash")
    assert config["verifier"]["architectures"] == ["LlamaForCausalLM"]


def test_p_eagle_needs_an_unused_token(tmp_path: Path, seven: Target) -> None:
    with pytest.raises(UserError, match="no unused special token"):
        exported(tmp_path, seven, P_EAGLE)
