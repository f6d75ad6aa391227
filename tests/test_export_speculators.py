"""EAGLE-3 in the form of speculators: the same drafts when read back, and accepted in vLLM."""

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decode.model.loading import Target
from draftsmith.auditing.verify_export import verify_export
from draftsmith.export.export_directory import export_drafter
from draftsmith.export.formats.eagle3_layer import is_speculators_config, speculators_config
from tests.export import (
    EAGLE3,
    assert_same_counts,
    make_taught,
    needs,
    task,
    train_import,
)
from tests.published import LAYOUTS


@pytest.fixture(scope="module")
def target(seven: Target) -> Target:
    return seven


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
@pytest.mark.thorough  # in the gate it reads DFlash of this layout, and EAGLE-3 of its own
@pytest.mark.parametrize("source", ["published", "window"])
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
