"""Exports of heads: the same heads when read back, and accepted in engines as in our own loop."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.base.errors import UserError
from decode.measure.tree_acceptance import probe
from decode.model.loading import Target, load_target
from draftsmith.export import ExportOptions
from draftsmith.export.engines import ENGINES, Counting
from draftsmith.export.export_directory import Measuring, check_export, export_drafter
from draftsmith.export.formats import FORMATS
from draftsmith.export.verify_export import count_drafts, verify_export
from heads.heads_module import Heads
from tests.export import (
    FEW,
    KEPT,
    PROMPTS,
    SHAPE,
    assert_same_counts,
    edit_json,
    edit_weights,
    exported,
    make_heads,
    needs,
    reloaded,
    save_target,
    task,
    train_import,
)
from tests.tiny import save_tiny

MEDUSA = {"type": "medusa", "heads": 3}
WEIGHTS = "medusa_lm_head.safetensors"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return save_target(tmp_path_factory.mktemp("target") / "target")


def logits(heads: Heads, features: torch.Tensor) -> torch.Tensor:
    """[n, K, V'] of features [n, H]."""
    heads_: Any = heads
    found: torch.Tensor = heads.output.logits(heads_.states(features, range(1, heads.depth + 1)))
    return found


@pytest.mark.parametrize("output", ["own", "shared", "target"])
@pytest.mark.parametrize("reduced", [False, True])
def test_the_export_is_the_same_heads(
    output: str, reduced: bool, tmp_path: Path, target: Target
) -> None:
    options = MEDUSA | {"output": output, "layers": 2}
    kept = KEPT if reduced else None
    heads = make_heads(tmp_path / "drafter", target, options, kept, moved=0.1)
    export_drafter(tmp_path / "drafter", "tgi", tmp_path / "out", measuring=FEW)
    found = reloaded(tmp_path / "out", target).heads
    features = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = logits(heads, features), logits(found, features)
        states = heads.states(features, range(1, 4))  # type: ignore[operator]
        whole = target.model.get_output_embeddings()(states)
    facts = check_export(tmp_path / "out")["facts"]
    if not reduced:
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
        assert facts["kept"] is None
    else:
        torch.testing.assert_close(theirs[..., KEPT], ours, rtol=0, atol=1e-5)
        torch.testing.assert_close(theirs[..., 1::2], whole[..., 1::2], rtol=0, atol=1e-5)
        assert facts["filled_from"] == "the target's output layer"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ("original_lm_head" in config) == (output != "own")


def test_identity_heads_are_accepted_in_our_loop(tmp_path: Path, target: Target) -> None:
    """They draft the target's next token again: right wherever it repeats itself."""
    out = exported(tmp_path, target, MEDUSA)
    drafted, accepted = count_drafts(
        task(target, out), reloaded(out, target), Counting(past_length=True)
    )
    assert drafted > 2000
    assert accepted > 30
    # Each draft is whole, though a text may end within it.
    assert drafted % 3 == 0


def test_what_stands_in_the_readme(tmp_path: Path, target: Target) -> None:
    out = exported(tmp_path, target, MEDUSA, KEPT)
    card = (out / "README.md").read_text()
    assert '"method": "medusa"' in card
    assert '"num_speculative_tokens": 3' in card
    assert "text-generation-launcher" in card
    assert "3 Medusa heads" in card
    assert "150 tokens of the vocabulary" in card
    config = json.loads((out / "config.json").read_text())
    assert config["base_model_name_or_path"] == "target"


def test_heads_with_a_tree_are_measured_in_chains(tmp_path: Path, target: Target) -> None:
    make_heads(tmp_path / "drafter", target, MEDUSA, tree=probe(2, 3))
    measuring = Measuring(lambda target: PROMPTS[:8], max_new_tokens=24)
    export_drafter(tmp_path / "drafter", "vllm", tmp_path / "out", measuring=measuring)
    before, after = check_export(tmp_path / "out")["acceptance"]
    same = ("drafted", "draft_efficiency", "tokens_per_step")
    assert [before[key] for key in same] == [after[key] for key in same]
    assert before["drafted"] > 0


# Refusals


def test_what_heads_cannot_be_exported(tmp_path: Path, target: Target) -> None:
    make_heads(tmp_path / "drafter", target, MEDUSA)
    make_heads(tmp_path / "blockwise", target, {"type": "blockwise", "k": 4, "hidden": 8})
    make_heads(tmp_path / "reduced", target, MEDUSA, KEPT)
    out = tmp_path / "out"
    refused = {
        "gguf": r"llama\.cpp has no Medusa heads; serve them with vLLM or TGI",
        "llama-server": r"llama\.cpp has no Medusa heads",
        "sglang": "sglang cannot hold a medusa drafter; use --format medusa",
    }
    for form, message in refused.items():
        with pytest.raises(UserError, match=message):
            export_drafter(tmp_path / "drafter", form, out)
    with pytest.raises(UserError, match="no engine supports Blockwise heads; train Medusa"):
        export_drafter(tmp_path / "blockwise", "vllm", out)
    with pytest.raises(UserError, match=r"gamma is 4, but .* drafts at most 3 tokens"):
        export_drafter(tmp_path / "drafter", "vllm", out, ExportOptions(gamma=4))
    with pytest.raises(UserError, match=r"must be measured: give --prompts"):
        export_drafter(tmp_path / "reduced", "vllm", out)
    save_tiny(tmp_path / "other", seed=5, **SHAPE)
    with pytest.raises(UserError, match="other weights"):
        export_drafter(
            tmp_path / "drafter", "vllm", out, ExportOptions(target=str(tmp_path / "other"))
        )
    assert not out.exists()


def test_an_export_for_another_target_or_deeper_drafts(tmp_path: Path, target: Target) -> None:
    out = exported(tmp_path, target, MEDUSA)
    save_tiny(tmp_path / "narrow")
    narrow = load_target(str(tmp_path / "narrow"))
    with pytest.raises(UserError, match=r"hidden size 64 and 300 tokens, but the target .* 32"):
        reloaded(out, narrow)
    save_tiny(tmp_path / "other", vocab=320, **SHAPE)
    other = load_target(str(tmp_path / "other"))
    installed = pytest.MonkeyPatch()
    with installed.context() as patch:
        patch.setattr(type(ENGINES["vllm"]), "missing", lambda self, python: None)
        with pytest.raises(UserError, match="has another vocabulary"):
            verify_export("vllm", task(other, out))
        with pytest.raises(UserError, match=r"gamma is 4, but .* drafts at most 3 tokens"):
            verify_export("vllm", task(target, out, gamma=4))


# Schema


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "architectures": (
        edit_json("config.json", architectures=["MedusaModel"]),
        "config.json has architectures, which is not expected",
    ),
    "no heads": (
        edit_json("config.json", medusa_num_heads=None),
        "config.json has no medusa_num_heads",
    ),
    "one head more": (
        edit_json("config.json", medusa_num_heads=4),
        "tensor 3.0.linear.bias is missing",
    ),
    "bias": (
        edit_weights(lambda found: found.pop("1.0.linear.bias")),
        "tensor 1.0.linear.bias is missing",
    ),
    "output": (
        edit_weights(lambda found: found.update({"0.1.weight": found["0.1.weight"][:-1].clone()})),
        "tensor 0.1.weight has shape [299, 64], expected [300, 64]",
    ),
    "extra": (
        edit_weights(lambda found: found.update({"lm_head.weight": torch.zeros(1)})),
        "tensor lm_head.weight is not expected",
    ),
    "dtype": (
        edit_json("config.json", torch_dtype="float16"),
        "tensor 0.0.linear.bias is F32, expected F16",
    ),
    "infinite": (
        edit_weights(lambda found: found["2.0.linear.weight"].fill_(torch.inf)),
        "tensor 2.0.linear.weight holds values that are NaN or infinite",
    ),
    "not one layer": (
        edit_weights(lambda found: found["2.1.weight"].add_(1)),
        "original_lm_head is set, but tensor 2.1.weight differs from head 0's",
    ),
    "no file": (lambda directory: (directory / WEIGHTS).unlink(), "cannot be read"),
    "no config": (
        lambda directory: (directory / "config.json").write_text("{"),
        "config.json is missing or is not JSON",
    ),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Path:
    return exported(tmp_path_factory.mktemp("sound"), target, MEDUSA | {"output": "shared"})


@pytest.mark.parametrize("what", WRONG)
def test_the_schema_finds(what: str, sound: Path, tmp_path: Path) -> None:
    change, problem = WRONG[what]
    for name in ("config.json", WEIGHTS):
        (tmp_path / name).write_bytes((sound / name).read_bytes())
    assert FORMATS["medusa"].problems(tmp_path) == []
    change(tmp_path)
    assert any(problem in line for line in FORMATS["medusa"].problems(tmp_path))


# vLLM

SERVED: dict[str, tuple[dict[str, Any], torch.Tensor | None]] = {
    "own": (MEDUSA, None),
    "shared": (MEDUSA | {"output": "shared", "layers": 2}, KEPT),
}


@pytest.mark.engine
@pytest.mark.parametrize("what", ["shared", pytest.param("own", marks=pytest.mark.thorough)])
def test_vllm_accepts_what_our_loop_accepts(what: str, tmp_path: Path, target: Target) -> None:
    """To the token, after a round trip through an import: identity heads, but for a little noise
    and training."""
    needs("vllm")
    options, kept = SERVED[what]
    exported(tmp_path, target, options, kept, moved=0.01)
    again = train_import(tmp_path, target, "vllm")
    found = verify_export("vllm", task(target, again), min_drafted=500)
    assert found.failures == []
    assert found.run.accepted_tokens > 0
    assert_same_counts(found)


@pytest.mark.engine
def test_vllm_ends_texts_as_our_loop_does(tmp_path: Path, target: Target) -> None:
    """With a token that texts are full of as their end, counts behind the end included."""
    needs("vllm")
    which = replace(target, eos_token_ids=(169,))
    out = exported(tmp_path, target, MEDUSA)
    found = verify_export("vllm", task(which, out), min_drafted=300)
    assert found.failures == []
    assert any(len(text) < 24 for text in found.run.plain_texts)
    assert_same_counts(found)
