"""EAGLE-3 in the form of speculators: the same drafts when read back, and accepted in vLLM."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from decode.model.loading import Target
from draftsmith.auditing.verify_export import verify_export
from draftsmith.export.export_directory import check_export, export_drafter
from draftsmith.export.formats.eagle3_layer import is_speculators_config, speculators_config
from tests.export import (
    EAGLE3,
    KEPT,
    assert_drafts_the_same,
    assert_same_counts,
    make_heads,
    make_taught,
    needs,
    task,
    train_import,
)
from tests.published import LAYOUTS


@pytest.fixture(scope="module")
def target(seven: Target) -> Target:
    return seven


@pytest.mark.parametrize("newer", [False, True], ids=["3", "3.1"])
@pytest.mark.parametrize("kept", [None, KEPT], ids=["whole", "reduced"])
def test_the_export_drafts_the_same(
    kept: torch.Tensor | None, newer: bool, tmp_path: Path, target: Target
) -> None:
    options = EAGLE3 | {"fc_norm": newer, "norm_output": newer}
    make_heads(tmp_path / "drafter", target, options, kept, moved=0.05)
    out = tmp_path / "out"
    export_drafter(tmp_path / "drafter", "speculators", out)
    assert_drafts_the_same(tmp_path / "drafter", out, target)
    assert check_export(out)["facts"]["kept"] == (None if kept is None else 150)
    names = load_file(out / "model.safetensors").keys()
    assert "layers.0.hidden_norm.weight" in names
    assert ("d2t" in names) == (kept is not None)
    assert ("fc_norm.2.weight" in names) == newer
    config = json.loads((out / "config.json").read_text("utf-8"))
    # Our captured_layers are the outputs of 1, 2 and 3; its readers count the layers that read
    # them.
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "target",
        "architectures": ["LlamaForCausalLM"],
    }


def test_a_target_whose_config_names_no_architecture(target: Target) -> None:
    """As one that was read from a GGUF file."""
    model = copy.deepcopy(target.model)
    model.config.architectures = None
    job: Any = SimpleNamespace(
        gamma=3, target_name="target", loaded_target=replace(target, model=model)
    )
    config = speculators_config("dflash", job)
    assert is_speculators_config(config, "dflash")
    assert config["verifier"]["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.engine
@pytest.mark.parametrize(
    "source", ["published", pytest.param("window", marks=pytest.mark.thorough)]
)
def test_vllm_accepts_what_our_loop_accepts(source: str, tmp_path: Path, target: Target) -> None:
    """To the token, after an import and a training: of a published checkpoint, and of our export
    of heads that see a window of the text."""
    needs("vllm")
    if source == "published":
        LAYOUTS["speculators_eagle3"](target).save(tmp_path / "out")
        again = train_import(tmp_path, target, "speculators", depth=3, steps=150)
    else:
        make_taught(tmp_path / "drafter", target, EAGLE3 | {"window": 6}, reduced=True)
        export_drafter(tmp_path / "drafter", "speculators", tmp_path / "out")
        again = train_import(tmp_path, target, "speculators", depth=3)
    found = verify_export("vllm", task(target, again))
    assert_same_counts(found)
    assert found.ours.accepted > 0.4 * found.ours.drafted
