"""One round trip per kind: a published drafter is imported, trained further, exported in the same
layout and imported again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from decode.base.errors import UserError
from decode.model.loading import Target
from draftsmith.export import ImportOptions
from draftsmith.export.export_directory import export_drafter
from draftsmith.export.import_directory import import_drafter
from heads.heads_directory import SAMPLE, read_heads, stored_options
from tests.export import DSPARK, KEPT, make_heads
from tests.published import LAYOUTS
from tests.stages import make_stage, plan_stage, run_stage, stage_context
from tests.test_import import FORMS
from tests.test_import_block import z_lab
from tests.tiny import VOCAB, save_tiny

# One batch holds all of the text, so that losses of two steps can be compared.
LOOP = {"epochs": 4, "tokens_per_batch": 2000, "log_every": 1}
SETTINGS: dict[str, Any] = {"loop": LOOP, "optimizer": {"lr": 3e-3, "warmup_steps": 1}}
BLOCK_LOSSES = {"cross_entropy": 0.1, "total_variation": 1.8}


def published_heads(layout: str) -> Callable[[Path, Target], Path]:
    return lambda directory, target: LAYOUTS[layout](target).save(directory)


def exported_dspark(directory: Path, target: Target) -> Path:
    """Ours in the layout that our export writes as its authors do."""
    make_heads(directory / "drafter", target, DSPARK, moved=0.05)
    export_drafter(directory / "drafter", "dspark", directory / "export")
    return directory / "export"


# One of each kind that trains differently. That each layout is read and written with the same
# tensors is in `test_import` and in the tests of the exports.
KINDS = ("specforge_eagle3", "eagle1", "speculators_p_eagle", "medusa")
BLOCKS: dict[str, Callable[[Path, Target], Path]] = {
    "dflash": lambda directory, _: z_lab(layers=7).save(directory),
    "dspark": exported_dspark,
}
HEADS = {kind: published_heads(kind) for kind in KINDS} | BLOCKS


@pytest.mark.parametrize("layout", HEADS)
def test_imported_heads_are_trained_and_exported(
    layout: str, tmp_path: Path, seven: Target, spare: Target
) -> None:
    has_mask = layout in BLOCKS or "p_eagle" in layout
    chosen = spare if has_mask else seven
    source = HEADS[layout](tmp_path / "published", chosen)
    is_fixed = layout in BLOCKS or layout == "medusa"  # their depth is not a choice
    options = ImportOptions(depth=None if is_fixed else 2)
    imported = import_drafter(str(source), chosen, tmp_path / "imported", options)
    settings = {"type": imported.kind, **(imported.settings or {})}
    losses = BLOCK_LOSSES if imported.kind == "dspark" else {"cross_entropy": 1.0}
    start = {"start": str(tmp_path / "imported"), "heads": settings, "losses": losses}
    drafter = train_further(tmp_path, chosen, "heads", **start)
    assert_returns(drafter, FORMS.get(layout, imported.kind), chosen, tmp_path, options)
    card = (tmp_path / "export" / "README.md").read_text("utf-8")
    assert "started from" in card


@pytest.mark.parametrize("layout", ["small_lm", "pard"])
def test_an_imported_model_is_trained_and_exported(
    layout: str, tmp_path: Path, spare: Target
) -> None:
    source = save_tiny(tmp_path / "published", layers=1, vocab=VOCAB + 4)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    parallel = {}
    if layout == "pard":
        model.config.pard_token = VOCAB + 2
        parallel = {"parallel": {"tokens": 3}}
    model.save_pretrained(source)
    imported = import_drafter(str(source), spare, tmp_path / "imported")
    assert imported.kind == layout
    start = {"drafter": {"model": str(tmp_path / "imported")}, **parallel}
    drafter = train_further(tmp_path, spare, "distill", **start)
    form = "hf" if layout == "small_lm" else "pard"
    assert_returns(drafter, form, spare, tmp_path, ImportOptions())
    config = json.loads((tmp_path / "again" / "config.json").read_text("utf-8"))
    assert config.get("pard_token") == (VOCAB + 2 if layout == "pard" else None)


def train_further(base: Path, target: Target, kind: str, **settings: Any) -> Path:
    """Train what was imported in a stage, which changes all of its weights and lowers its loss.
    Returns the new drafter."""
    stage = make_stage(kind, "tune", **settings, **SETTINGS)
    outcome = run_stage(stage_context(base / "stages", target), stage)
    history = outcome.summary["training"]["history"]
    assert history[-1]["loss"] < history[0]["loss"]
    assert outcome.drafter is not None
    trained = weights_of(outcome.drafter)
    for name, before in weights_of(base / "imported").items():
        if not name.endswith(("draft_vocabulary", SAMPLE)):
            assert trained[name].dtype == torch.float32, name
            assert not torch.equal(trained[name], before.float()), name
    return outcome.drafter


def assert_returns(
    drafter: Path, form: str, target: Target, base: Path, options: ImportOptions
) -> None:
    """The export of a drafter is imported with the same tensors, bit by bit."""
    export_drafter(drafter, form, base / "export")
    import_drafter(str(base / "export"), target, base / "again", options)
    before, after = weights_of(drafter), weights_of(base / "again")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert torch.equal(tensor, after[name]), name


def weights_of(drafter: Path) -> dict[str, torch.Tensor]:
    (file,) = drafter.glob("*.safetensors")
    return load_file(file)


def test_imported_heads_keep_their_settings(tmp_path: Path, seven: Target) -> None:
    published = LAYOUTS["specforge_eagle3"](seven)
    out = tmp_path / "imported"
    import_drafter(str(published.save(tmp_path / "published")), seven, out, ImportOptions(depth=2))
    settings = stored_options(out).model_dump(exclude_defaults=True) | {"type": "eagle3"}
    with pytest.raises(UserError, match=r"set the same type and options, heads: \{"):
        make_stage("heads", "tune", start=str(out), heads={"type": "eagle3"}, **SETTINGS)
    with pytest.raises(UserError, match="no earlier stage 'nowhere'"):
        make_stage("heads", "tune", start="nowhere", heads=settings, **SETTINGS)
    stage = make_stage("heads", "tune", start=str(out), heads=settings, **SETTINGS)
    plan = plan_stage(stage_context(tmp_path / "stages", seven), stage)
    heads = read_heads(out, seven)
    assert plan.trained_parameters == sum(p.numel() for p in heads.parameters())
    assert heads.vocabulary is not None
    assert torch.equal(heads.vocabulary, KEPT)
