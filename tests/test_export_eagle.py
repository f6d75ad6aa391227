"""Exports of EAGLE's layers: the same drafts when read back, and accepted in vLLM as by us."""

from pathlib import Path
from typing import Any

import pytest

from decode.base.errors import UserError
from decode.model.loading import Target
from draftsmith.auditing.verify_export import verify_export
from draftsmith.export.export_directory import check_export, export_drafter
from tests.export import (
    EAGLE1,
    EAGLE3,
    FEW,
    KEPT,
    assert_same_counts,
    make_heads,
    make_taught,
    needs,
    reloaded,
    task,
    train_import,
)

EAGLE31 = EAGLE3 | {"fc_norm": True, "norm_output": True}
# What published layers have that ours have not.
OTHER3 = EAGLE3 | {
    "norm_before_fc": True,
    "norm_before_residual": True,
    "captured_layers": [1, 3, 5],
    "layer": {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-3},
}


@pytest.fixture(scope="module")
def target(seven: Target) -> Target:
    return seven


def test_eagle1_drafts_a_whole_vocabulary(tmp_path: Path, target: Target) -> None:
    """vLLM has the target's output layer for it and nothing else, so that is measured."""
    make_heads(tmp_path / "drafter", target, EAGLE1, KEPT)
    with pytest.raises(UserError, match="must be measured"):
        export_drafter(tmp_path / "drafter", "vllm", tmp_path / "out")
    export_drafter(tmp_path / "drafter", "vllm", tmp_path / "out", measuring=FEW)
    assert reloaded(tmp_path / "out", target).heads.vocabulary is None
    assert check_export(tmp_path / "out")["facts"]["filled_from"] == "the target's output layer"


@pytest.mark.engine
@pytest.mark.parametrize(
    ("options", "reduced"),
    [
        pytest.param(EAGLE31, True, id="eagle3.1-reduced"),
        pytest.param(EAGLE1, False, id="eagle1", marks=pytest.mark.thorough),
        *(
            pytest.param(options, True, id=f"{name}-reduced", marks=pytest.mark.thorough)
            for name, options in {"eagle3": EAGLE3, "eagle3-other": OTHER3}.items()
        ),
    ],
)
def test_vllm_accepts_what_our_loop_accepts(
    options: dict[str, Any], reduced: bool, tmp_path: Path, target: Target
) -> None:
    """To the token, after a round trip through an import."""
    needs("vllm")
    make_taught(tmp_path / "drafter", target, options, reduced)
    export_drafter(tmp_path / "drafter", "vllm", tmp_path / "out")
    again = train_import(tmp_path, target, "vllm", depth=3)
    found = verify_export("vllm", task(target, again))
    assert_same_counts(found)
    assert found.ours.accepted > 0.4 * found.ours.drafted


@pytest.mark.engine
def test_openvino_accepts_what_our_loop_accepts(tmp_path: Path, target: Target) -> None:
    """Nearly all, as we do: its last draft of a text is shorter. Half, if it read the layers that
    it takes by default."""
    needs("openvino")
    make_taught(tmp_path / "drafter", target, EAGLE3, reduced=True)
    export_drafter(tmp_path / "drafter", "openvino", tmp_path / "out")
    found = verify_export("openvino", task(target, tmp_path / "out"))
    assert found.failures == []
    assert found.theirs.accepted > 0.95 * found.theirs.drafted > 400
