"""EAGLE-3 as GGUF: the same drafts when read back, and accepted in llama-server as by us."""

import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from decode.base.errors import UserError
from decode.model.loading import Target, load_target
from draftsmith.auditing.verify_export import verify_export
from draftsmith.export import ExportOptions
from draftsmith.export.acceptance import Counting, OwnLoop, count_drafts
from draftsmith.export.export_directory import export_drafter
from draftsmith.export.formats import format_for
from draftsmith.export.formats.gguf_layout import rows_in_halves, rows_in_pairs
from tests.export import (
    EAGLE3,
    KEPT,
    PROMPTS,
    assert_same_counts,
    export_for_llama_server,
    make_heads,
    make_taught,
    needs,
    reloaded,
    rewrite_gguf,
    save_target,
    task,
)
from tests.test_target import write_gguf
from tests.tiny import save_tiny

KINDS: dict[str, tuple[dict[str, Any], torch.Tensor | None]] = {
    "whole": (EAGLE3, None),
    "target's": (EAGLE3 | {"output": "target"}, None),
    "reduced": (EAGLE3, KEPT),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Seven layers, the fewest in which EAGLE-3 has three to read."""
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    write_gguf(path, layers=7)
    return load_target(str(path))


def exported(
    path: Path,
    target: Target,
    kind: str,
    moved: float = 0.0,
    file: Path | None = None,
    dtype: str | None = None,
) -> Path:
    """The export of such heads; file: that will be served, where it is not the target's own."""
    options, kept = KINDS[kind]
    make_heads(path / "drafter", target, options, kept, moved)
    return export_for_llama_server(path, file or target.name, dtype)


def test_rows_in_pairs_and_back() -> None:
    rows = torch.arange(24).reshape(8, 3)
    assert rows_in_pairs(rows, 2)[:, 0].div(3).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    rows = torch.arange(48).reshape(16, 3)
    assert rows_in_pairs(rows, 2)[:8, 0].div(3).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert torch.equal(rows_in_halves(rows_in_pairs(rows, 2), 2), rows)


def test_the_dtype_of_the_weights(tmp_path: Path, target: Target) -> None:
    out = exported(tmp_path, target, "reduced", moved=0.05, dtype="bfloat16")
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(out / "drafter.gguf").tensors}
    assert (types["fc.weight"], types["output_norm.weight"], types["d2t"]) == ("BF16", "F32", "I64")
    reloaded(out, target)


def test_what_may_be_asked_for() -> None:
    for name in ("gguf", "llama-server", "llama.cpp", "eagle3-gguf"):
        assert format_for(name, "eagle3").name == "eagle3-gguf"
    assert format_for("gguf", "small_lm").name == format_for("llama.cpp", "small_lm").name == "gguf"
    with pytest.raises(UserError, match="cannot hold a small_lm drafter; use --format gguf or hf"):
        format_for("eagle3-gguf", "small_lm")


def test_what_cannot_be_written(tmp_path: Path, target: Target) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    scaled = save_target(tmp_path / "scaled", layers=7, rope_parameters=rope)
    make_heads(tmp_path / "rope", scaled, EAGLE3)
    with pytest.raises(UserError, match=r"has rope_type linear.*convert_hf_to_gguf"):
        export_drafter(
            tmp_path / "rope", "gguf", tmp_path / "out", ExportOptions(target=target.name)
        )
    rewrite_gguf(Path(shutil.copy(target.name, tmp_path / "other.gguf")), _swap_tokens)
    make_heads(tmp_path / "drafter", target, EAGLE3)
    other = str(tmp_path / "other.gguf")
    with pytest.raises(UserError, match=r"20 of the 300 tokens of .* differ from"):
        export_drafter(tmp_path / "drafter", "gguf", tmp_path / "out", ExportOptions(target=other))
    assert not (tmp_path / "out").exists()


def _swap_tokens(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
    tokens = keys["tokenizer.ggml.tokens"]
    tokens[100:120] = tokens[110:120] + tokens[100:110]


def test_the_file_that_is_served_may_be_quantized(tmp_path: Path, target: Target) -> None:
    """Heads are read for the weights they were trained on; of the file only the tokens count."""
    file = Path(shutil.copy(target.name, tmp_path / "rounded.gguf"))

    def rounded(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name, values in tensors.items():
            tensors[name] = values.round(1)

    rewrite_gguf(file, rounded)
    out = exported(tmp_path, target, "whole", moved=0.05, file=file)
    served = load_target(str(file))
    own = OwnLoop(served, reloaded(out, served), PROMPTS[:8], 3, 24)
    assert count_drafts(own, Counting())[0] > 100


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Path]:
    """A target with Llama 3's positions and its file, of which transformers does not read them."""
    place = tmp_path_factory.mktemp("llama3")
    write_gguf(place / "target.gguf", layers=7, rope_parameters=LLAMA3)
    save_tiny(place / "target", layers=7, rope_parameters=LLAMA3)
    return load_target(str(place / "target")), place / "target.gguf"


def test_positions_of_llama_3(llama3: tuple[Target, Path], tmp_path: Path) -> None:
    target, file = llama3
    out = exported(tmp_path, target, "reduced", file=file)
    found = {t.name: torch.tensor(t.data) for t in gguf.GGUFReader(out / "drafter.gguf").tensors}
    turns: Any = target.model.model.rotary_emb
    plain = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(found["rope_freqs.weight"] * turns.inv_freq, plain)
    assert found["rope_freqs.weight"].tolist()[::3] == [1, 8]
    reloaded(out, target)


def test_an_export_for_another_target(tmp_path: Path, target: Target) -> None:
    out = exported(tmp_path, target, "whole")
    write_gguf(tmp_path / "deeper.gguf", layers=9)
    with pytest.raises(UserError, match=r"inputs of layers \[2, 3, 4\] of its target"):
        reloaded(out, load_target(str(tmp_path / "deeper.gguf")))


@pytest.mark.engine
@pytest.mark.parametrize(("which", "reduced"), [("", False), ("", True), ("llama3", True)])
def test_llama_server_accepts_what_our_loop_accepts(
    which: str, reduced: bool, tmp_path: Path, target: Target, llama3: tuple[Target, Path]
) -> None:
    """To the token. With the layers one off, or the rows of q and k as they were, it accepts a
    third as much."""
    needs("llama-server")
    target, file = llama3 if which else (target, Path(target.name))
    make_taught(tmp_path / "drafter", target, EAGLE3, reduced)
    out = export_for_llama_server(tmp_path, file)
    found = verify_export("llama-server", task(target, out, target_spec=str(file)))
    assert_same_counts(found)
    assert found.ours.accepted > 0.4 * found.ours.drafted
