"""Exports of heads that see a window of the text: written where readers keep to it."""

import json
from pathlib import Path
from typing import Any

import pytest

from decode.base.errors import UserError
from decode.model.loading import Target
from draftsmith.export import ImportOptions
from draftsmith.export.export_directory import check_export, export_drafter
from draftsmith.export.formats import FORMATS
from draftsmith.export.formats.published_layer import published_window
from draftsmith.export.import_directory import import_drafter
from heads.heads_directory import stored_options
from tests.export import (
    DFLASH,
    EAGLE3,
    P_EAGLE,
    assert_drafts_the_same,
    edit_json,
    make_heads,
    reloaded,
)

WINDOW = 4


@pytest.fixture(scope="module")
def target(spare: Target) -> Target:
    return spare


@pytest.mark.parametrize(
    ("options", "form"), [(EAGLE3, "speculators"), (P_EAGLE, "vllm"), (DFLASH, "speculators")]
)
def test_a_window_comes_back(
    options: dict[str, Any], form: str, tmp_path: Path, target: Target
) -> None:
    is_block = options is DFLASH
    make_heads(tmp_path / "drafter", target, options | {"window": WINDOW}, moved=0.1)
    out = tmp_path / "out"
    export_drafter(tmp_path / "drafter", form, out)
    config = json.loads((out / "config.json").read_text("utf-8"))
    layers = config.get("transformer_layer_config", config)
    assert set(layers["layer_types"]) == {"sliding_attention"}
    assert len(layers["layer_types"]) == layers["num_hidden_layers"]
    assert layers["sliding_window"] == WINDOW
    assert layers.get("use_sliding_window", True)
    layout = FORMATS[check_export(out)["layout"]]
    again: Any = reloaded(out, target)
    assert again.heads.options.window == WINDOW
    assert_drafts_the_same(tmp_path / "drafter", out, target)
    depth = ImportOptions(depth=None if is_block else 3)
    import_drafter(str(out), target, tmp_path / "imported", depth)
    imported: Any = stored_options(tmp_path / "imported")
    assert imported.window == WINDOW
    if is_block:
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


def test_a_published_window_is_that_of_sliding_layers() -> None:
    sliding = {"layer_types": ["sliding_attention"], "sliding_window": 9}
    assert published_window(sliding) == (9, [])
    assert published_window({"sliding_window": 9}) == (None, [])
    assert published_window({"layer_types": ["full_attention"], "sliding_window": 9}) == (None, [])
    others: list[dict[str, Any]] = [{"layer_types": ["sliding_attention", "other"]}]
    for wrong in (*others, {"layer_types": ["other"]}, {"sliding_window": None}):
        window, problems = published_window(sliding | wrong)
        assert window is None
        assert "layer_types" in problems[0]
