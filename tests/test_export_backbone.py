"""Drafters that were trained together with their target, which is exported with them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from decode.base.artifact import MANIFEST, CorruptArtifact, write_directory
from decode.base.errors import UserError
from decode.model.loading import Target, load_target
from decode.opening.directory import describe_drafter
from draftsmith.auditing.verify_export import verify_export
from draftsmith.cli import main as cli
from draftsmith.export import ExportOptions, export_directory
from draftsmith.export.export_directory import check_export, export_drafter
from tests.export import (
    MEDUSA,
    PROMPTS,
    SHAPE,
    assert_same_counts,
    make_heads,
    make_taught,
    needs,
    save_target,
    task,
)
from tests.stages import LOOP, examples, make_stage, run_stage, stage_context
from tests.tiny import save_tiny

DRIFT = {"kl": 0.0123, "perplexity_original": 8.5, "perplexity_new": 8.25, "tokens": 321}
PROVENANCE = {"stage": "both", "run": "r", "drift": DRIFT, "original": "org/model"}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What such a stage leaves: target/ and drafter/."""
    place = tmp_path_factory.mktemp("run") / "stages" / "01-both"
    model = save_tiny(tmp_path_factory.mktemp("model") / "model", **SHAPE)

    def fill(directory: Path) -> None:
        shutil.copytree(model, directory, dirs_exist_ok=True)

    write_directory(place / "target", fill)
    target = load_target(str(place / "target"))
    make_heads(place / "drafter", target, MEDUSA, provenance=PROVENANCE)
    return place


@pytest.fixture
def moved(stage: Path, tmp_path: Path) -> Path:
    """The same elsewhere, where a test may damage it."""
    return Path(shutil.copytree(stage, tmp_path / "moved"))


def test_both_are_written(moved: Path, tmp_path: Path) -> None:
    out, new = tmp_path / "heads", tmp_path / "model"
    export_drafter(moved / "drafter", "vllm", out, ExportOptions(backbone=new, data_licence="MIT"))
    before, after = load_target(str(moved / "target")), load_target(str(new))
    ids = torch.tensor([PROMPTS[3]])
    assert torch.equal(after.model(ids).logits, before.model(ids).logits)
    config = json.loads((new / "config.json").read_text("utf-8"))
    assert (config["torch_dtype"], config["rope_theta"]) == ("float32", 10000.0)
    assert (new / MANIFEST).exists()
    record = check_export(out)
    assert record["backbone"] == "model"
    assert (
        json.loads((out / "config.json").read_text("utf-8"))["base_model_name_or_path"] == "model"
    )
    drift = (
        "its drift from org/model, on 321 held-out tokens: KL(original‖new) 0.0123 nats per token, "
        "perplexity 8.50 → 8.25"
    )
    card = (out / "README.md").read_text("utf-8")
    assert "vllm serve model --speculative-config" in card
    assert drift in card
    card = (new / "README.md").read_text("utf-8")
    assert drift in card
    assert "base_model: org/model" in card
    assert "It is not the original model any more" in card
    assert 'vllm serve model --speculative-config \'{"method": "medusa", "model": "heads"' in card


def test_what_is_pushed(moved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[tuple[str, str]] = []

    def upload(repo_id: str, folder_path: Path, **rest: Any) -> str:
        pushed.append((repo_id, folder_path.name))
        return repo_id

    monkeypatch.setattr(export_directory.huggingface_hub, "create_repo", lambda *a, **b: None)
    monkeypatch.setattr(export_directory.huggingface_hub, "upload_folder", upload)
    words = ["export", str(moved / "drafter"), "--format", "vllm", "--out", str(tmp_path / "heads")]
    both = ["--backbone", str(tmp_path / "model"), "--push-to-hub", "org/heads"]
    found = CliRunner().invoke(cli.app, [*words, *both])
    assert found.exit_code == 0, found.output
    assert pushed == [("org/heads-target", "model"), ("org/heads", "heads")]
    assert "vllm serve org/heads-target" in (tmp_path / "heads" / "README.md").read_text("utf-8")
    refused = CliRunner().invoke(
        cli.app, ["export", str(tmp_path / "heads"), "--push-to-hub", "org/heads"]
    )
    assert refused.exit_code == 2
    assert "give --backbone DIR" in " ".join(refused.output.split())


def test_refusals(moved: Path, tmp_path: Path) -> None:
    out, new, drafter = tmp_path / "heads", tmp_path / "model", moved / "drafter"

    def refused(message: str, **asked: Any) -> None:
        with pytest.raises(UserError, match=message):
            export_drafter(drafter, "vllm", out, ExportOptions(**asked))
        assert not out.exists()
        assert not new.exists()

    refused("trained together with its target.*give --backbone DIR")
    refused("overlap", backbone=out / "target")
    refused("overlap", backbone=out)
    with pytest.raises(UserError, match="nothing is overwritten; give another --backbone"):
        export_drafter(drafter, "vllm", out, ExportOptions(backbone=moved / "target"))
    other = save_tiny(tmp_path / "other", seed=5, **SHAPE)
    refused("has other weights than the target in use", backbone=new, target=str(other))
    (moved / "target" / "tokenizer.json").write_text("{}", "utf-8")
    with pytest.raises(CorruptArtifact):
        export_drafter(drafter, "vllm", out, ExportOptions(backbone=new))
    (moved / "target" / MANIFEST).unlink()
    (moved / "target" / "model.safetensors").write_bytes(b"x")
    refused("is not a valid model directory:\n- model.safetensors cannot be read", backbone=new)
    shutil.rmtree(moved / "target")
    refused(r"target does not exist\. It is the\s+target/ directory.*--target DIR", backbone=new)
    make_heads(tmp_path / "plain", save_target(tmp_path / "whole"), MEDUSA)
    with pytest.raises(UserError, match="for an unchanged target; leave --backbone out"):
        export_drafter(tmp_path / "plain", "vllm", out, ExportOptions(backbone=new))


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's affair
def test_what_a_stage_leaves_is_exported(tmp_path: Path) -> None:
    original = save_target(tmp_path / "original")
    context = stage_context(tmp_path / "run", original)
    context.corpus.examples["test"] = examples("test", 3)
    settings: Any = {"heads": MEDUSA, "backbone": {"lora": {"r": 4}}, "loop": LOOP | {"epochs": 1}}
    outcome = run_stage(context, make_stage("heads", "both", **settings))
    assert outcome.drafter is not None
    provenance = describe_drafter(outcome.drafter)["provenance"]
    assert provenance["original"] == original.name
    export_drafter(
        outcome.drafter, "tgi", tmp_path / "heads", ExportOptions(backbone=tmp_path / "model")
    )
    card = (tmp_path / "model" / "README.md").read_text("utf-8")
    assert f"its drift from original, on {provenance['drift']['tokens']} held-out tokens" in card
    assert str(tmp_path) not in card


@pytest.mark.engine
@pytest.mark.thorough  # in the gate vLLM accepts what heads of this kind draft on their own target
def test_vllm_accepts_what_our_loop_accepts(stage: Path, tmp_path: Path) -> None:
    """Both as they were exported, to the token."""
    needs("vllm")
    target: Target = load_target(str(stage / "target"))
    make_taught(tmp_path / "taught", target, MEDUSA, provenance=PROVENANCE)
    out, new = tmp_path / "heads", tmp_path / "model"
    export_drafter(
        tmp_path / "taught", "vllm", out, ExportOptions(target=str(stage / "target"), backbone=new)
    )
    served = replace(load_target(str(new)), name=str(new))
    found = verify_export("vllm", task(served, out))
    assert_same_counts(found)
    assert found.ours.accepted > 0.4 * found.ours.drafted
