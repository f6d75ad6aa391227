"""The exports of drafters that draft in one pass: PARD's and P-EAGLE's."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.base.errors import UserError
from decode.drafters.pard import ParallelLMDrafter, mark_parallel
from decode.model.loading import Target, load_target
from draftsmith.auditing.verify_export import verify_export
from draftsmith.export import ExportOptions
from draftsmith.export.export_directory import check_export, export_drafter, reload_export
from draftsmith.export.formats import FORMATS, format_for
from tests.export import (
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
from tests.tiny import VOCAB, save_small_lm, with_noise

MASK = 1  # <|im_start|>, which no prompt contains


def export(directory: Path, target: Target, mask: int = MASK, **changes: Any) -> Path:
    """The target with a little noise, as if it drafted in one pass: its first tokens are often
    right, and later ones sometimes."""
    model = copy.deepcopy(target.model)
    mark_parallel(model.config, mask)
    save_small_lm(directory / "drafter", with_noise(model, 0.04), target, "pard")
    options = ExportOptions(gamma=3, **changes)
    export_drafter(directory / "drafter", "vllm", directory / "export", options)
    return directory / "export"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return save_target(tmp_path_factory.mktemp("target") / "target")


def test_the_export_is_the_same_drafter(tmp_path: Path, target: Target) -> None:
    out = export(tmp_path, target)
    config = json.loads((out / "config.json").read_text("utf-8"))
    assert (config["pard_token"], config["spd_type"]) == (MASK, "pard")
    drafter = reload_export(out, check_export(out), target)
    assert isinstance(drafter, ParallelLMDrafter)
    assert drafter.mask_token == MASK
    assert '"parallel_drafting": true' in (out / "README.md").read_text("utf-8")


def test_readers_that_would_draft_one_token_after_the_other_are_refused() -> None:
    assert format_for("vllm", "pard") is FORMATS["pard"]
    for name in ("transformers", "sglang", "hf", "gguf"):
        with pytest.raises(UserError, match="cannot hold a pard drafter; use --format pard"):
            format_for(name, "pard")


@pytest.mark.engine
def test_vllm_drafts_what_our_loop_drafts(tmp_path: Path) -> None:
    """To the token, after an import and a training. No text has the mask token, so it can be
    trained."""
    needs("vllm")
    target = save_target(tmp_path / "target", vocab=VOCAB + 4)
    with torch.no_grad():  # vLLM would also draft these four, and our loop drafts tokens only.
        target.model.get_input_embeddings().weight[VOCAB:] = 0
    target.model.save_pretrained(tmp_path / "target")
    target = load_target(str(tmp_path / "target"))
    source, again = export(tmp_path, target, mask=VOCAB + 1), tmp_path / "again"
    tuned = distill_import(tmp_path, target, source, parallel={"tokens": 3})
    export_drafter(tuned, "vllm", again, ExportOptions(gamma=3))
    done = verify_export("vllm", task(target, again))
    assert_same_counts(done)
    assert 0.02 < done.ours.accepted / done.ours.drafted < 0.98


# --- P-EAGLE --------------------------------------------------------------------------------------


def test_p_eagle_needs_an_unused_token(tmp_path: Path, seven: Target) -> None:
    with pytest.raises(UserError, match="no unused special token"):
        exported(tmp_path, seven, P_EAGLE)


@pytest.mark.engine
@pytest.mark.thorough  # in the gate vLLM drafts in parallel with PARD, and with heads of EAGLE-3
@pytest.mark.parametrize("form", ["vllm", "speculators"])
def test_vllm_accepts_what_p_eagle_drafts(form: str, tmp_path: Path, spare: Target) -> None:
    """To the token, after a round trip through an import, with trained embeddings."""
    needs("vllm")
    make_taught(tmp_path / "drafter", spare, P_EAGLE | {"embeddings": "trained"})
    export_drafter(tmp_path / "drafter", form, tmp_path / "out", ExportOptions(gamma=3))
    again = train_import(tmp_path, spare, form, depth=3)
    done = verify_export("vllm", task(spare, again))
    assert_same_counts(done)
    assert done.ours.accepted > 0.1 * done.ours.drafted
