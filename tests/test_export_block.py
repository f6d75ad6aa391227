"""Exports of block drafters: the same drafts when read back, and accepted in vLLM as by us."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from decode.base.errors import UserError
from decode.model.loading import Target
from decode.opening.directory import open_drafter
from draftsmith.export.engines import Counting
from draftsmith.export.export_directory import check_export, export_drafter
from draftsmith.export.formats import FORMATS
from draftsmith.export.verify_export import count_drafts, verify_export
from tests.export import (
    KEPT,
    PROMPTS,
    assert_same_counts,
    edit_json,
    edit_weights,
    make_heads,
    make_taught,
    needs,
    reloaded,
    save_target,
    task,
    train_import,
)

DFLASH: dict[str, Any] = {"type": "dflash", "layers": 2, "block": 4, "taps": [0, 2]}
DSPARK: dict[str, Any] = {"type": "dspark", "layers": 2, "block": 3, "taps": [0, 2], "rank": 8}
DFLASH2: dict[str, Any] = DFLASH | {"type": "dflash2", "rank": 8, "candidates": 5}
KINDS = {"dflash": DFLASH, "dspark": DSPARK, "dflash2": DFLASH2}
FORMATS_TRIED = [
    pytest.param("dflash", "vllm", None, id="dflash"),
    pytest.param("dspark", "vllm", None, id="dspark"),
    pytest.param("dflash2", "vllm", None, id="dflash2"),
    pytest.param("dflash", "speculators", None, id="speculators-dflash"),
    pytest.param("dspark", "speculators", None, id="speculators-dspark"),
    pytest.param("dflash", "speculators", KEPT, id="reduced-dflash"),
    pytest.param("dspark", "speculators", KEPT, id="reduced-dspark"),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """With ids that are no tokens, for the mask."""
    place = tmp_path_factory.mktemp("target") / "target"
    return save_target(place, layers=3, vocab=304)


@pytest.mark.parametrize(("kind", "form", "kept"), FORMATS_TRIED)
def test_the_export_drafts_the_same(
    kind: str, form: str, kept: torch.Tensor | None, tmp_path: Path, target: Target
) -> None:
    make_heads(tmp_path / "drafter", target, KINDS[kind], kept, moved=0.1)
    out = tmp_path / "out"
    export_drafter(tmp_path / "drafter", form, out)
    few = task(target, out, prompts=PROMPTS[:8])
    before = open_drafter(str(tmp_path / "drafter"), target)
    counted = [count_drafts(few, x, Counting()) for x in (before, reloaded(out, target))]
    assert counted[0] == counted[1]
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
    config = json.loads((out / "config.json").read_text())
    if form == "speculators":
        # The layers that read our taps.
        assert config["aux_hidden_state_layer_ids"] == [1, 3]
        assert config["sample_from_anchor"] == (kind == "dspark")
    else:
        inner = config if kind == "dspark" else config["dflash_config"]
        assert inner["target_layer_ids"] == [0, 2]
        assert inner["mask_token_id"] == 303


def test_what_block_drafters_cannot_be_exported(tmp_path: Path, target: Target) -> None:
    make_heads(tmp_path / "reduced", target, DFLASH, KEPT)
    make_heads(tmp_path / "reduced2", target, DFLASH2, KEPT)
    make_heads(tmp_path / "dspark", target, DSPARK)
    for name, form, message in (
        ("reduced", "vllm", "reduced draft vocabulary, .*; export them as speculators-dflash"),
        ("reduced2", "vllm", "reduced draft vocabulary, which no engine reads; train them without"),
        ("dspark", "sglang", "format sglang cannot hold a dspark drafter; use --format dspark"),
        ("dspark", "gguf", "use --format dspark or speculators-dspark"),
    ):
        with pytest.raises(UserError, match=message):
            export_drafter(tmp_path / name, form, tmp_path / "out")
    export_drafter(tmp_path / "dspark", "vllm", tmp_path / "out")
    with pytest.raises(UserError, match=r"this export is dspark: .*newer runner, in which"):
        verify_export("vllm", task(target, tmp_path / "out"))


WRONG: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "a mask embedding": (
        "dflash",
        edit_weights(lambda tensors: tensors.update({"mask_hidden": torch.zeros(64)})),
        "tensor mask_hidden is not expected",
    ),
    "taps past the target": (
        "dflash",
        edit_json("config.json", dflash_config={"mask_token_id": 3, "target_layer_ids": [0, 3]}),
        "the target's layers are [0, 3], which is not valid",
    ),
    "no mask token": (
        "dflash",
        edit_json("config.json", dflash_config={"target_layer_ids": [0, 2]}),
        "dflash_config is",
    ),
    "a causal layer": (
        "dflash",
        edit_json("config.json", layer_types=["full_attention", "sliding_attention"]),
        "layer_types is",
    ),
    "a causal block": (
        "dflash2",
        edit_json("config.json", is_causal=True),
        "is_causal is True, expected False",
    ),
    "no convolution": (
        "dflash2",
        edit_weights(lambda tensors: tensors.pop("layers.1.mlp_conv.base_kernel")),
        "tensor layers.1.mlp_conv.base_kernel is missing",
    ),
    "a gated Markov head": (
        "dspark",
        edit_json("config.json", markov_head_type="gated"),
        "markov_head_type is gated, expected vanilla",
    ),
    "no Markov head": (
        "dspark",
        edit_weights(lambda tensors: tensors.pop("markov_head.markov_w2.weight")),
        "tensor markov_head.markov_w2.weight is missing",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_the_schema_finds(what: str, tmp_path: Path, target: Target) -> None:
    kind, change, problem = WRONG[what]
    make_heads(tmp_path / "drafter", target, KINDS[kind])
    out = tmp_path / "out"
    export_drafter(tmp_path / "drafter", "vllm", out)
    assert FORMATS[kind].problems(out) == []
    change(out)
    assert any(problem in line.replace("'", "") for line in FORMATS[kind].problems(out)) or any(
        problem in line for line in FORMATS[kind].problems(out)
    )


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
    verified = verify_export("vllm", task(target, again), min_drafted=500)
    assert not verified.failures
    assert_same_counts(verified)
    assert verified.our_accepted > 0.2 * verified.our_drafted
