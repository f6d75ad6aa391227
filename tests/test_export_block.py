"""Exports of block drafters: the same drafts when read back, and accepted in vLLM as by us."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from decode.base.errors import UserError
from decode.model.loading import Target
from draftsmith.auditing.verify_export import verify_export
from draftsmith.export.export_directory import check_export, export_drafter
from draftsmith.export.formats import FORMATS
from draftsmith.export.import_directory import import_drafter
from draftsmith.export.published import Checkpoint
from heads.heads_directory import read_heads
from tests.export import (
    DFLASH,
    DFLASH2,
    DSPARK,
    KEPT,
    XPRESS,
    assert_drafts_the_same,
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


@pytest.mark.parametrize(
    ("kind", "form", "kept"),
    [
        pytest.param("dflash", "vllm", None, id="dflash"),
        pytest.param("dspark", "vllm", None, id="dspark"),
        pytest.param("dflash2", "vllm", None, id="dflash2"),
        pytest.param("dflash", "speculators", None, id="speculators-dflash"),
        pytest.param("dspark", "speculators", None, id="speculators-dspark"),
        pytest.param("dflash", "speculators", KEPT, id="reduced-dflash"),
        pytest.param("dspark", "speculators", KEPT, id="reduced-dspark"),
        pytest.param("xpress", "speculators", None, id="speculators-xpress"),
        pytest.param("xpress", "speculators", KEPT, id="reduced-xpress"),
    ],
)
def test_the_export_drafts_the_same_and_is_imported_as_it_was(
    kind: str, form: str, kept: torch.Tensor | None, tmp_path: Path, target: Target
) -> None:
    drafter, out = tmp_path / "drafter", tmp_path / "out"
    make_heads(drafter, target, KINDS[kind], kept, moved=0.1)
    export_drafter(drafter, form, out)
    assert_drafts_the_same(drafter, out, target)
    facts = check_export(out)["facts"]
    assert (facts["max_depth"], facts["filled_from"]) == (3, None)
    assert facts["kept"] == (None if kept is None else len(KEPT))
    stored = load_file(out / "model.safetensors")
    names = stored.keys()
    assert ("d2t" in names) == ("t2d" in names) == (kept is not None)
    if kept is not None:
        table = target.model.get_output_embeddings().weight
        assert torch.equal(stored["lm_head.weight"], table[kept])
    assert "layers.1.self_attn.k_norm.weight" in names
    assert ("embed_tokens.weight" in names) == (form == "speculators")
    config = json.loads((out / "config.json").read_text("utf-8"))
    if form == "speculators":
        # The layers that read our taps.
        assert config["aux_hidden_state_layer_ids"] == [1, 3]
        assert config["sample_from_anchor"] == (kind == "dspark")
        # The library writes these beside the settings of its layers, or not at all.
        for key in ("architectures", "block_size", "num_target_layers"):
            del config["transformer_layer_config"][key]
        (out / "config.json").write_text(json.dumps(config), "utf-8")
    else:
        inner = config if kind == "dspark" else config["dflash_config"]
        assert inner["target_layer_ids"] == [0, 2]
        assert inner["mask_token_id"] == 303

    checkpoint = Checkpoint.open(str(out))
    (layout,) = [name for name in FORMATS if FORMATS[name].recognises(checkpoint)]
    assert layout == (kind if form == "vllm" else f"speculators-{kind}")
    import_drafter(str(out), target, tmp_path / "again")
    before, after = (read_heads(path, target) for path in (drafter, tmp_path / "again"))
    assert before.options == after.options
    assert before.state_dict().keys() == after.state_dict().keys()
    for name, tensor in before.state_dict().items():
        assert torch.equal(tensor, after.state_dict()[name]), name
    if kept is not None:
        assert after.vocabulary is not None
        assert torch.equal(after.vocabulary, kept)


def test_vllm_reads_dspark_in_its_newer_runner_only(tmp_path: Path, target: Target) -> None:
    make_heads(tmp_path / "dspark", target, DSPARK)
    export_drafter(tmp_path / "dspark", "vllm", tmp_path / "out")
    with pytest.raises(UserError, match=r"this export is dspark: .*newer runner, in which"):
        verify_export("vllm", task(target, tmp_path / "out"))


@pytest.mark.engine
@pytest.mark.parametrize(
    ("form", "reduced"),
    [
        ("vllm", False),
        ("speculators", True),
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
