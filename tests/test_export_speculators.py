"""EAGLE-3 in the form of speculators: the same drafts when read back, and accepted in vLLM."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from decode.model.loading import Target
from decode.opening.directory import open_drafter
from draftsmith.export.engines import Counting
from draftsmith.export.export_directory import check_export, export_drafter
from draftsmith.export.formats import FORMATS
from draftsmith.export.formats.eagle3_layer import is_speculators_config, speculators_config
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
from tests.published import LAYOUTS

EAGLE3 = {"type": "eagle3", "steps": 3}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Seven layers, the fewest in which EAGLE-3 has three to read."""
    return save_target(tmp_path_factory.mktemp("target") / "target", layers=7)


def exported(
    path: Path,
    target: Target,
    kept: torch.Tensor | None,
    moved: float = 0.0,
    **options: Any,
) -> Path:
    make_heads(path / "drafter", target, EAGLE3 | options, kept, moved)
    export_drafter(path / "drafter", "speculators", path / "out")
    return path / "out"


@pytest.mark.parametrize("newer", [False, True], ids=["3", "3.1"])
@pytest.mark.parametrize("kept", [None, KEPT], ids=["whole", "reduced"])
def test_the_export_drafts_the_same(
    kept: torch.Tensor | None, newer: bool, tmp_path: Path, target: Target
) -> None:
    out = exported(tmp_path, target, kept, moved=0.05, fc_norm=newer, norm_output=newer)
    before = open_drafter(str(tmp_path / "drafter"), target)
    counted = [
        count_drafts(task(target, out, prompts=PROMPTS[:8]), drafter, Counting())
        for drafter in (before, reloaded(out, target))
    ]
    assert counted[0] == counted[1]
    assert check_export(out)["facts"]["kept"] == (None if kept is None else 150)
    names = load_file(out / "model.safetensors").keys()
    assert "layers.0.hidden_norm.weight" in names
    assert ("d2t" in names) == (kept is not None)
    assert ("fc_norm.2.weight" in names) == newer
    config = json.loads((out / "config.json").read_text())
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


def edit_nested(*keys: str, **changes: Any) -> Callable[[Path], None]:
    """Sets keys of an object within config.json."""

    def edit(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        inner = config
        for key in keys:
            inner = inner[key]
        inner.update(changes)
        (directory / "config.json").write_text(json.dumps(config))

    return edit


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "another algorithm": (
        edit_nested("speculators_config", algorithm="eagle"),
        "speculators_config is",
    ),
    "nobody's": (
        edit_nested("speculators_config", "verifier", name_or_path=None),
        "which is not valid",
    ),
    "another normed residual": (
        edit_json("config.json", norm_before_residual="after"),
        "norm_before_residual is 'after', which is not valid",
    ),
    "no layer": (edit_json("config.json", transformer_layer_config=[]), "transformer_layer_config"),
    "another layer": (
        edit_nested("transformer_layer_config", intermediate_size=64),
        "tensor layers.0.mlp.down_proj.weight has shape [64, 128], expected [64, 64]",
    ),
    "eagle3's name": (
        edit_weights(
            lambda found: found.update({"midlayer.x": found.pop("layers.0.hidden_norm.weight")})
        ),
        "tensor layers.0.hidden_norm.weight is missing",
    ),
    "two layers to read": (
        edit_nested(eagle_aux_hidden_state_layer_ids=[2, 3]),
        "tensor fc.weight has shape [64, 192], expected [64, 128]",
    ),
    "a type": (edit_json("config.json", model_type="llama"), "model_type, which is not expected"),
    "no map": (edit_weights(lambda found: found.pop("d2t")), "tensor d2t is missing"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Path:
    return exported(tmp_path_factory.mktemp("sound"), target, KEPT)


@pytest.mark.parametrize("what", WRONG)
def test_the_schema_finds(what: str, sound: Path, tmp_path: Path) -> None:
    change, problem = WRONG[what]
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((sound / name).read_bytes())
    form = FORMATS["speculators"]
    assert form.problems(tmp_path) == []
    change(tmp_path)
    assert any(problem in line for line in form.problems(tmp_path))


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
    found = verify_export("vllm", task(target, again), min_drafted=500)
    assert found.failures == []
    assert_same_counts(found)
    assert found.our_accepted > 0.4 * found.our_drafted
