"""Exports of block drafters: the same drafts when read back, and accepted in vLLM as by us."""

from pathlib import Path

import pytest

from decode.base.errors import UserError
from decode.model.loading import Target
from draftsmith.auditing.verify_export import verify_export
from draftsmith.export.export_directory import export_drafter
from tests.export import (
    DFLASH,
    DFLASH2,
    DSPARK,
    XPRESS,
    assert_same_counts,
    make_heads,
    make_taught,
    needs,
    save_target,
    task,
    train_import,
)

KINDS = {"dflash": DFLASH, "dspark": DSPARK, "dflash2": DFLASH2 | {"window": 16}}
KINDS["xpress"] = XPRESS


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """With ids that are no tokens, for the mask."""
    place = tmp_path_factory.mktemp("target") / "target"
    return save_target(place, layers=3, vocab=304)


def test_vllm_reads_dspark_in_its_newer_runner_only(tmp_path: Path, target: Target) -> None:
    make_heads(tmp_path / "dspark", target, DSPARK)
    export_drafter(tmp_path / "dspark", "vllm", tmp_path / "out")
    with pytest.raises(UserError, match=r"this export is dspark: .*newer runner, in which"):
        verify_export("vllm", task(target, tmp_path / "out"))


@pytest.mark.engine
def test_openvino_accepts_what_we_accept(tmp_path: Path, target: Target) -> None:
    needs("openvino")
    make_taught(tmp_path / "drafter", target, DFLASH)
    export_drafter(tmp_path / "drafter", "openvino", tmp_path / "out")
    found = verify_export("openvino", task(target, tmp_path / "out"))
    assert found.failures == []
    assert found.theirs.accepted > 0.9 * found.theirs.drafted > 400


@pytest.mark.engine
@pytest.mark.parametrize(
    ("form", "reduced"),
    [
        ("speculators", True),
        pytest.param("vllm", False, marks=pytest.mark.thorough),
        pytest.param("speculators", False, marks=pytest.mark.thorough),
    ],
)
def test_vllm_accepts_what_we_accept(
    form: str, reduced: bool, tmp_path: Path, target: Target
) -> None:
    """To the token, after a round trip through an import. γ is that of the block: vLLM feeds so
    many mask tokens."""
    needs("vllm")
    make_taught(tmp_path / "drafter", target, DFLASH, reduced=reduced)
    export_drafter(tmp_path / "drafter", form, tmp_path / "out")
    # On a CPU vLLM norms the keys of the text in all layers with the weights of the first one.
    again = train_import(tmp_path, target, form, same="k_norm.weight")
    # Most drafts are accepted, so there are few of them.
    verified = verify_export("vllm", task(target, again))
    assert_same_counts(verified)
    assert verified.ours.accepted > 0.2 * verified.ours.drafted
