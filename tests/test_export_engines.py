"""Engines accept what our loop accepts of exported heads, to the token: after a round trip through
an import and a training. Each engine has its own environment."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.drafters.pard import mark_parallel
from decode.model.loading import Target, load_target
from draftsmith.auditing.verify_export import verify_export
from draftsmith.export import ExportOptions
from draftsmith.export.export_directory import export_drafter
from tests.export import (
    DFLASH,
    EAGLE1,
    EAGLE3,
    KEPT,
    MEDUSA,
    NEWER3,
    OTHER3,
    P_EAGLE,
    assert_same_counts,
    distill_import,
    exported,
    make_taught,
    needs,
    save_target,
    task,
    train_import,
)
from tests.published import LAYOUTS
from tests.tiny import VOCAB, save_small_lm, with_noise

TRAINED = P_EAGLE | {"embeddings": "trained"}
# By what vLLM is given: the layout, the options of heads, and whether their draft vocabulary is
# reduced. None: a published checkpoint.
VLLM: dict[str, tuple[str, dict[str, Any] | None, bool]] = {
    "eagle3.1": ("vllm", NEWER3, True),
    "speculators-dflash reduced": ("speculators", DFLASH, True),
    "eagle1": ("vllm", EAGLE1, False),
    "eagle3": ("vllm", EAGLE3, True),
    "eagle3 other": ("vllm", OTHER3, True),
    "speculators published": ("speculators", None, True),
    "speculators window": ("speculators", EAGLE3 | {"window": 6}, True),
    "dflash": ("vllm", DFLASH, False),
    "speculators-dflash": ("speculators", DFLASH, False),
    "p_eagle": ("vllm", TRAINED, False),
    "speculators-peagle": ("speculators", TRAINED, False),
}
# Of heads that draft in one pass less is accepted.
LEAST = {"dflash": 0.2, "p_eagle": 0.1}
IN_THE_GATE = ("eagle3.1", "speculators-dflash reduced")


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """With ids that are no tokens, for the mask."""
    return save_target(tmp_path_factory.mktemp("target") / "target", layers=3, vocab=VOCAB + 4)


@pytest.mark.engine
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in IN_THE_GATE else pytest.mark.thorough)
        for name in VLLM
    ],
)
def test_vllm_accepts_what_our_loop_accepts(
    name: str, tmp_path: Path, seven: Target, spare: Target, blocks: Target
) -> None:
    needs("vllm")
    form, options, reduced = VLLM[name]
    kind = "eagle3" if options is None else options["type"]
    target = {"p_eagle": spare, "dflash": blocks}.get(kind, seven)
    if options is None:
        LAYOUTS["speculators_eagle3"](target).save(tmp_path / "out")
    else:
        make_taught(tmp_path / "drafter", target, options, reduced)
        export_drafter(tmp_path / "drafter", form, tmp_path / "out", ExportOptions(gamma=3))
    steps = 150 if options is None else 10
    if kind == "dflash":
        # On a CPU vLLM norms the keys of the text in all layers with the weights of the first one.
        again = train_import(tmp_path, target, form, same="k_norm.weight")
    else:
        again = train_import(tmp_path, target, form, depth=3, steps=steps)
    found = verify_export("vllm", task(target, again))
    assert_same_counts(found)
    assert found.ours.accepted > LEAST.get(kind, 0.4) * found.ours.drafted


@pytest.mark.engine
@pytest.mark.parametrize("output", ["shared", pytest.param("own", marks=pytest.mark.thorough)])
def test_vllm_accepts_medusa(output: str, tmp_path: Path) -> None:
    """Identity heads, but for a little noise and training."""
    needs("vllm")
    target = save_target(tmp_path / "target")
    options = MEDUSA | ({"output": "shared", "layers": 2} if output == "shared" else {})
    exported(tmp_path, target, options, KEPT if output == "shared" else None, moved=0.01)
    found = verify_export("vllm", task(target, train_import(tmp_path, target, "vllm")))
    assert found.theirs.accepted > 0
    assert_same_counts(found)


@pytest.mark.engine
def test_vllm_accepts_a_parallel_model(tmp_path: Path) -> None:
    """The target with a little noise, as if it drafted in one pass: its first tokens are often
    right, and later ones sometimes. No text has the mask token, so it can be trained."""
    needs("vllm")
    target = save_target(tmp_path / "target", vocab=VOCAB + 4)
    with torch.no_grad():  # vLLM would also draft these four, and our loop drafts tokens only.
        target.model.get_input_embeddings().weight[VOCAB:] = 0
    target.model.save_pretrained(tmp_path / "target")
    target = load_target(str(tmp_path / "target"))
    model = copy.deepcopy(target.model)
    mark_parallel(model.config, VOCAB + 1)
    save_small_lm(tmp_path / "drafter", with_noise(model, 0.04), target, "pard")
    source, again = tmp_path / "export", tmp_path / "again"
    export_drafter(tmp_path / "drafter", "vllm", source, ExportOptions(gamma=3))
    tuned = distill_import(tmp_path, target, source, parallel={"tokens": 3})
    export_drafter(tuned, "vllm", again, ExportOptions(gamma=3))
    done = verify_export("vllm", task(target, again))
    assert_same_counts(done)
    assert 0.02 < done.ours.accepted / done.ours.drafted < 0.98


@pytest.mark.engine
@pytest.mark.parametrize(("options", "least"), [(EAGLE3, 0.95), (DFLASH, 0.9)])
def test_openvino_accepts_what_our_loop_accepts(
    options: dict[str, Any], least: float, tmp_path: Path, seven: Target, blocks: Target
) -> None:
    """Nearly all, as we do: its last draft of a text is shorter. Half, if it read the layers that
    it takes by default."""
    needs("openvino")
    is_eagle = options is EAGLE3
    target = seven if is_eagle else blocks
    make_taught(tmp_path / "drafter", target, options, reduced=is_eagle)
    export_drafter(tmp_path / "drafter", "openvino", tmp_path / "out")
    found = verify_export("openvino", task(target, tmp_path / "out"))
    assert found.failures == []
    assert found.theirs.accepted > least * found.theirs.drafted > 400
