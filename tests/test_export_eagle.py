"""Exports of EAGLE's layers: the same drafts when read back, and accepted in vLLM as by us."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from decode.base.errors import UserError
from decode.model.loading import Target
from decode.opening.directory import open_drafter
from draftsmith.export import ExportOptions
from draftsmith.export.engines import Counting
from draftsmith.export.export_directory import check_export, export_drafter
from draftsmith.export.formats import FORMATS
from draftsmith.export.verify_export import count_drafts, verify_export
from tests.export import (
    FEW,
    KEPT,
    PROMPTS,
    assert_same_counts,
    edit_json,
    edit_weights,
    exported,
    make_heads,
    make_taught,
    needs,
    reloaded,
    save_target,
    task,
    train_import,
)

EAGLE1 = {"type": "eagle1", "depth": 3}
EAGLE3 = {"type": "eagle3", "steps": 3}
EAGLE31 = EAGLE3 | {"fc_norm": True, "norm_output": True}
# What published layers have that ours have not.
OTHER3 = EAGLE3 | {
    "norm_before_fc": True,
    "norm_before_residual": True,
    "captured_layers": [1, 3, 5],
    "layer": {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-3},
}
KINDS: dict[str, tuple[dict[str, Any], torch.Tensor | None]] = {
    "eagle1": (EAGLE1, None),
    "eagle3": (EAGLE3, None),
    "eagle3-target": (EAGLE3 | {"output": "target"}, None),
    "eagle3-reduced": (EAGLE3, KEPT),
    "eagle3-target-reduced": (EAGLE3 | {"output": "target"}, KEPT),
    "eagle3-low-rank-reduced": (EAGLE3 | {"output": "target", "output_rank": 16}, KEPT),
    "eagle3.1-reduced": (EAGLE31, KEPT),
    "eagle3-other-reduced": (OTHER3, KEPT),
}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Seven layers, the fewest in which EAGLE-3 has three to read."""
    return save_target(tmp_path_factory.mktemp("target") / "target", layers=7)


@kinds
def test_the_export_drafts_the_same(kind: str, tmp_path: Path, target: Target) -> None:
    options, kept = KINDS[kind]
    out = exported(tmp_path, target, options, kept, moved=0.05)
    asked = task(target, out, prompts=PROMPTS[:8])
    before = open_drafter(str(tmp_path / "drafter"), target)
    counted = [
        count_drafts(asked, drafter, Counting()) for drafter in (before, reloaded(out, target))
    ]
    assert counted[0] == counted[1]
    weights = load_file(out / "model.safetensors")
    record = check_export(out)
    assert record["layout"] == options["type"]
    assert record["facts"]["max_depth"] == 3
    if kept is not None:
        assert record["facts"]["kept"] == 150
        assert record["facts"]["filled_from"] is None
        assert weights["lm_head.weight"].shape == (150, 64)
        assert torch.equal(weights["d2t"] + torch.arange(150), kept)
        assert (
            "150 tokens of the vocabulary, and it drafts only these"
            in (out / "README.md").read_text()
        )


def test_eagle1_drafts_a_whole_vocabulary(tmp_path: Path, target: Target) -> None:
    """vLLM has the target's output layer for it and nothing else, so that is measured."""
    make_heads(tmp_path / "drafter", target, EAGLE1, KEPT)
    with pytest.raises(UserError, match="must be measured"):
        export_drafter(tmp_path / "drafter", "vllm", tmp_path / "out")
    export_drafter(tmp_path / "drafter", "vllm", tmp_path / "out", measuring=FEW)
    assert reloaded(tmp_path / "out", target).heads.vocabulary is None
    assert check_export(tmp_path / "out")["facts"]["filled_from"] == "the target's output layer"


@pytest.mark.parametrize("options", [EAGLE1, EAGLE3], ids=["eagle1", "eagle3"])
def test_identity_layers_are_accepted_in_our_loop(
    options: dict[str, Any], tmp_path: Path, target: Target
) -> None:
    out = exported(tmp_path, target, options)
    drafted, accepted = count_drafts(task(target, out), reloaded(out, target), Counting())
    assert drafted > 2000
    assert accepted > 10


def test_what_layers_cannot_be_exported(tmp_path: Path, target: Target) -> None:
    make_heads(tmp_path / "eagle1", target, EAGLE1)
    make_heads(tmp_path / "eagle3", target, EAGLE3)
    make_heads(tmp_path / "low", target, EAGLE1 | {"output_rank": 8})
    make_heads(tmp_path / "hydra", target, {"type": "hydra", "heads": 3})
    make_heads(tmp_path / "hydra_plus", target, {"type": "hydra_plus", "heads": 3})
    refused = {
        ("eagle1", "gguf"): r"llama\.cpp has no EAGLE-1; serve it with vLLM",
        ("eagle3", "tgi"): "cannot hold a eagle3 drafter; use --format eagle3",
        ("low", "sglang"): "has an output layer of its own .output_rank., but readers of format",
        ("hydra", "vllm"): "no engine supports Hydra heads",
        ("hydra_plus", "vllm"): r"no engine supports Hydra\+\+ heads",
    }
    for (name, form), message in refused.items():
        with pytest.raises(UserError, match=message):
            export_drafter(tmp_path / name, form, tmp_path / "out")
    with pytest.raises(UserError, match=r"gamma is 4, but .* drafts at most 3 tokens"):
        export_drafter(tmp_path / "eagle1", "vllm", tmp_path / "out", ExportOptions(gamma=4))
    assert not (tmp_path / "out").exists()


# Schema


WRONG: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "fc with a bias": (
        "eagle1",
        edit_weights(lambda found: found.update({"fc.bias": torch.zeros(64)})),
        "tensor fc.bias is not expected",
    ),
    "a norm too many": (
        "eagle1",
        edit_weights(
            lambda found: found.update({"layers.0.input_layernorm.weight": torch.ones(64)})
        ),
        "tensor layers.0.input_layernorm.weight is not expected",
    ),
    "another engine's architecture": (
        "eagle1",
        edit_json("config.json", architectures=["LlamaForCausalLMEagle"]),
        "architectures is ['LlamaForCausalLMEagle'], expected ['LlamaForCausalLM']",
    ),
    "fc turned": (
        "eagle1",
        edit_weights(lambda found: found.update({"fc.weight": found["fc.weight"].T.contiguous()})),
        "tensor fc.weight has shape [128, 64], expected [64, 128]",
    ),
    "a missing norm": (
        "eagle3-reduced",
        edit_weights(lambda found: found.pop("midlayer.hidden_norm.weight")),
        "tensor midlayer.hidden_norm.weight is missing",
    ),
    "layers named": (
        "eagle3-reduced",
        edit_json("config.json", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}),
        "config.json has eagle_config, which is not expected",
    ),
    "no draft vocabulary": (
        "eagle3-reduced",
        edit_json("config.json", draft_vocab_size=None),
        "config.json has no draft_vocab_size",
    ),
    "no map": (
        "eagle3-reduced",
        edit_weights(lambda found: found.pop("d2t")),
        "tensor d2t is missing",
    ),
    "ids in place of offsets": (
        "eagle3-reduced",
        edit_weights(lambda found: found["d2t"].add_(torch.arange(150))),
        "d2t does not give distinct token ids",
    ),
    "another map back": (
        "eagle3-reduced",
        edit_weights(lambda found: found["t2d"].logical_not_()),
        "t2d does not mark the tokens of d2t",
    ),
    "rope": (
        "eagle3-reduced",
        edit_json("config.json", rope_theta=0),
        "rope_theta is 0, which is not valid",
    ),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, target: Target) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("sound")
    return {
        kind: exported(place / kind, target, *KINDS[kind]) for kind in ("eagle1", "eagle3-reduced")
    }


@pytest.mark.parametrize("what", WRONG)
def test_the_schema_finds(what: str, sound: dict[str, Path], tmp_path: Path) -> None:
    kind, change, problem = WRONG[what]
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((sound[kind] / name).read_bytes())
    form = FORMATS[kind.split("-")[0]]
    assert form.problems(tmp_path) == []
    change(tmp_path)
    assert any(problem in line for line in form.problems(tmp_path))


@pytest.mark.engine
@pytest.mark.parametrize(
    ("options", "reduced"),
    [
        pytest.param(EAGLE1, False, id="eagle1"),
        pytest.param(EAGLE31, True, id="eagle3.1-reduced"),
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
    found = verify_export("vllm", task(target, again), min_drafted=500)
    assert found.failures == []
    assert_same_counts(found)
    assert found.our_accepted > 0.4 * found.our_drafted
