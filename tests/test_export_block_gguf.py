"""Block drafters as GGUF: the same drafts when read back and when imported, and accepted in
llama-server as by us."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from decode.base.errors import UserError
from decode.model.loading import Target
from draftsmith.auditing.verify_export import verify_export
from draftsmith.export.formats.gguf_layout import read_weights
from draftsmith.export.import_directory import import_drafter
from heads.heads_directory import read_heads
from tests.export import (
    DFLASH,
    DFLASH2,
    DSPARK,
    SHAPE,
    export_for_llama_server,
    make_heads,
    make_taught,
    needs,
    reloaded,
    rewrite_gguf,
    save_target,
    task,
)
from tests.test_export_eagle_gguf import LLAMA3
from tests.test_target import write_gguf


def with_file(place: Path, **changes: Any) -> tuple[Target, Path]:
    """A target with ids that are no tokens, and its GGUF file."""
    shape = {"layers": 4, "vocab": 304} | changes
    write_gguf(place / "target.gguf", **SHAPE, **shape)
    return save_target(place / "target", **shape), place / "target.gguf"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Path]:
    return with_file(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Path]:
    return with_file(tmp_path_factory.mktemp("llama3"), rope_parameters=LLAMA3)


def exported(
    place: Path,
    of: tuple[Target, Path],
    options: dict[str, Any],
    kept: torch.Tensor | None = None,
    dtype: str | None = None,
) -> Path:
    make_heads(place / "drafter", of[0], options, kept, moved=0.1)
    return export_for_llama_server(place, of[1], dtype)


@pytest.mark.parametrize(("dtype", "kind"), [("q8_0", "Q8_0"), ("q4_0", "Q4_0")])
def test_quantised_weights_are_read_back_to_the_bit(
    dtype: str, kind: str, tmp_path: Path, plain: tuple[Target, Path]
) -> None:
    target, _ = plain
    out = exported(tmp_path, plain, DSPARK, dtype=dtype)
    reader = gguf.GGUFReader(out / "drafter.gguf")
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    # Rows of 8 numbers are not whole blocks.
    assert (types["fc.weight"], types["markov_w1.weight"]) == (kind, "F16")
    assert types["blk.1.attn_norm.weight"] == "F32"
    drafter, stored = reloaded(out, target), read_weights(reader)
    state = drafter.heads.state_dict()
    assert torch.equal(state["fc.weight"], stored["fc.weight"])
    assert torch.equal(state["layers.1.mlp.up_proj.weight"], stored["blk.1.ffn_up.weight"])
    original = read_heads(tmp_path / "drafter", target).state_dict()["fc.weight"]
    step = original.abs().amax() / (127 if dtype == "q8_0" else 7)
    assert 0 < (state["fc.weight"] - original).abs().max() <= step
    with pytest.raises(UserError, match=f"has weights in {kind}; expected the original"):
        import_drafter(str(out / "drafter.gguf"), target, tmp_path / "again")


def test_a_file_that_computes_something_else_is_not_imported(
    tmp_path: Path, plain: tuple[Target, Path], llama3: tuple[Target, Path]
) -> None:
    out = exported(tmp_path, llama3, DFLASH)
    file, place = out / "drafter.gguf", tmp_path / "again"
    with pytest.raises(UserError, match=r"positions are scaled by rope_freqs\.weight, and in"):
        import_drafter(str(file), plain[0], place)
    import_drafter(str(file), llama3[0], place)

    def changed(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        keys["dflash.attention.sliding_window_pattern"] = [True, False]
        tensors["blk.0.attn_sinks.weight"] = tensors["blk.0.attn_norm.weight"][:2].copy()
        keys["tokenizer.ggml.mask_token_id"] = 7

    windows = exported(tmp_path / "windows", plain, DFLASH | {"window": 8}) / "drafter.gguf"
    rewrite_gguf(windows, changed)
    with pytest.raises(UserError, match=r"sliding_attention', 'full_attention'.*expected one kind"):
        import_drafter(str(windows), plain[0], tmp_path / "mixed")


def test_a_hostile_file_is_refused_in_words(tmp_path: Path, plain: tuple[Target, Path]) -> None:
    file = exported(tmp_path, plain, DFLASH) / "drafter.gguf"

    def odd(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["blk.5"] = tensors["blk.0.attn_norm.weight"].copy()

    def many(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        keys["dflash.block_count"] = 2**31

    for change, message in ((odd, "blk.5"), (many, "block_count is 2147483648, which is not")):
        rewrite_gguf(file, change)
        with pytest.raises(UserError, match=message):
            import_drafter(str(file), plain[0], tmp_path / "again")


def test_what_llama_cpp_cannot_capture(tmp_path: Path, plain: tuple[Target, Path]) -> None:
    with pytest.raises(UserError, match=r"outputs of the layers \[0, 3\] .* has 4 layers"):
        exported(tmp_path, plain, DFLASH | {"taps": [0, 3]})


@pytest.mark.engine
@pytest.mark.parametrize(
    ("options", "which", "reduced", "dtype"),
    [
        (DFLASH, "plain", False, None),
        (DFLASH | {"window": 8}, "plain", True, None),
        (DFLASH, "llama3", True, "q8_0"),
        (DSPARK | {"confidence": False}, "plain", False, None),
        (DSPARK | {"confidence": False}, "plain", True, "q4_0"),
        (DFLASH2, "plain", False, None),
        (DFLASH2 | {"window": 8}, "plain", False, "q8_0"),
    ],
)
def test_llama_server_accepts_what_our_loop_accepts(
    options: dict[str, Any],
    which: str,
    reduced: bool,
    dtype: str | None,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """The same texts, and the same share. It makes up to 2% fewer drafts than our loop."""
    needs("llama-server")
    target, file = request.getfixturevalue(which)
    make_taught(tmp_path / "drafter", target, options, reduced)
    out = export_for_llama_server(tmp_path, file, dtype)
    found = verify_export("llama-server", task(target, out, target_spec=str(file)))
    assert found.failures == []
    assert found.theirs.drafted == pytest.approx(found.ours.drafted, rel=0.05)
    assert found.ours.accepted > 0.2 * found.ours.drafted
