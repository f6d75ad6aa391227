"""Exports of heads that see a window of the text: written where readers keep to it."""

import json
from pathlib import Path
from typing import Any

import pytest

from decode.base.errors import UserError
from decode.model.loading import Target
from decode.opening.directory import open_drafter
from draftsmith.export import ImportOptions
from draftsmith.export.engines import Counting
from draftsmith.export.export_directory import check_export, export_drafter
from draftsmith.export.formats import FORMATS
from draftsmith.export.formats.published_layer import published_window
from draftsmith.export.import_directory import import_drafter
from draftsmith.export.verify_export import count_drafts
from heads.heads_directory import stored_options
from tests.export import PROMPTS, edit_json, make_heads, reloaded, save_target, task

WINDOW = 4
KINDS: dict[str, dict[str, Any]] = {
    "eagle1": {"type": "eagle1", "depth": 3},
    "eagle3": {"type": "eagle3", "steps": 3},
    "p_eagle": {"type": "p_eagle", "tokens": 3, "layers": 2},
    "dflash": {"type": "dflash", "layers": 2, "block": 4, "taps": [0, 2]},
    "dspark": {"type": "dspark", "layers": 2, "block": 3, "taps": [0, 2], "rank": 8},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return save_target(tmp_path_factory.mktemp("target") / "target", layers=7, vocab=304)


@pytest.mark.parametrize(
    ("kind", "form"), [("eagle3", "speculators"), ("p_eagle", "vllm"), ("dflash", "speculators")]
)
def test_a_window_comes_back(kind: str, form: str, tmp_path: Path, target: Target) -> None:
    make_heads(tmp_path / "drafter", target, KINDS[kind] | {"window": WINDOW}, moved=0.1)
    out = tmp_path / "out"
    export_drafter(tmp_path / "drafter", form, out)
    config = json.loads((out / "config.json").read_text())
    layers = config.get("transformer_layer_config", config)
    assert set(layers["layer_types"]) == {"sliding_attention"}
    assert len(layers["layer_types"]) == layers["num_hidden_layers"]
    assert layers["sliding_window"] == WINDOW
    assert layers.get("use_sliding_window", True)
    layout = FORMATS[check_export(out)["layout"]]
    few = task(target, out, prompts=PROMPTS[:8])
    again: Any = reloaded(out, target)
    assert again.heads.options.window == WINDOW
    before = open_drafter(str(tmp_path / "drafter"), target)
    counted = [count_drafts(few, x, Counting()) for x in (before, again)]
    assert counted[0] == counted[1]
    depth = ImportOptions(depth=None if kind == "dflash" else 3)
    import_drafter(str(out), target, tmp_path / "imported", depth)
    options: Any = stored_options(tmp_path / "imported")
    assert options.window == WINDOW
    if kind == "dflash":
        # The tokens of a block would see only those before them.
        edit_json("config.json", sliding_window_non_causal=False)(out)
        with pytest.raises(UserError, match="sliding_window_non_causal is False, expected True"):
            import_drafter(str(out), target, tmp_path / "causal")
        edit_json("config.json", sliding_window_non_causal=True)(out)
    changed = {"sliding_window": 0}
    if "transformer_layer_config" in config:
        changed = {"transformer_layer_config": layers | changed}
    edit_json("config.json", **changed)(out)
    assert "sliding_window" in layout.problems(out)[0]


@pytest.mark.parametrize(
    ("kind", "form", "advice"),
    [
        ("eagle1", "vllm", "train it without window"),
        ("eagle3", "sglang", "export it as speculators"),
        ("eagle3", "gguf", "export it as speculators"),
        ("dflash", "vllm", "export it as speculators-dflash"),
        ("dspark", "speculators", "train it without window"),
    ],
)
def test_readers_that_would_ignore_a_window_are_refused(
    kind: str, form: str, advice: str, tmp_path: Path, target: Target
) -> None:
    make_heads(tmp_path / "drafter", target, KINDS[kind] | {"window": WINDOW})
    with pytest.raises(UserError, match=f"a window of {WINDOW} tokens, .*; {advice}"):
        export_drafter(tmp_path / "drafter", form, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sinks_are_refused(tmp_path: Path, target: Target) -> None:
    make_heads(tmp_path / "drafter", target, KINDS["eagle3"] | {"window": WINDOW, "sinks": 2})
    with pytest.raises(UserError, match="no engine keeps sinks"):
        export_drafter(tmp_path / "drafter", "speculators", tmp_path / "out")


def test_a_published_window_is_that_of_sliding_layers() -> None:
    sliding = {"layer_types": ["sliding_attention"], "sliding_window": 9}
    assert published_window(sliding) == (9, [])
    assert published_window({"sliding_window": 9}) == (None, [])
    assert published_window({"layer_types": ["full_attention"], "sliding_window": 9}) == (None, [])
    for wrong in ({"sliding_window": None}, {"layer_types": ["sliding_attention", "other"]}):
        window, problems = published_window(sliding | wrong)
        assert window is None
        assert "sliding_window" in problems[0]
