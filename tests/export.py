"""What tests of exports share: a tiny target that vLLM can run too, heads on it, and engines."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence

from decode.model.forward import few_rows
from decode.model.loading import Target, load_target
from decode.opening.directory import open_drafter
from distill.losses import WeightedLoss
from distill.teacher.feature_sources import LiveFeatures
from draftsmith.auditing.verify_export import ExportVerification
from draftsmith.export import ExportOptions, ImportOptions
from draftsmith.export.compare_acceptance import Counting, OwnLoop, count_drafts
from draftsmith.export.engine_kinds import ENGINES, EngineTask
from draftsmith.export.export_directory import (
    Measuring,
    check_export,
    export_drafter,
    reload_export,
)
from draftsmith.export.import_directory import import_drafter
from heads.head_training import HeadTraining
from heads.heads_directory import new_heads, read_heads, save_heads
from heads.heads_drafter import HeadsDrafter
from heads.heads_module import Heads
from heads.options import HeadOptions
from tests.stages import make_stage, run_stage, stage_context
from tests.tiny import VOCAB, finish_gguf, plain_texts, save_tiny

PROMPTS = [[3 + i, 17 + i, 250 - i, 9, 42 + i][: 2 + i % 4] for i in range(40)]
# Attention heads of 32 numbers, the least that vLLM has kernels for.
SHAPE: dict[str, Any] = {"hidden": 64, "heads": 2, "kv_heads": 2}
KEPT = torch.arange(0, VOCAB, 2)
# So few tokens that nothing can be lost by those that are filled in.
FEW = Measuring(lambda target: PROMPTS[:4], max_new_tokens=3)
MEDUSA: dict[str, Any] = {"type": "medusa", "heads": 3}
EAGLE1: dict[str, Any] = {"type": "eagle1", "depth": 3}
EAGLE3: dict[str, Any] = {"type": "eagle3", "steps": 3}
# As later releases of EAGLE have it, and what published layers have that ours have not.
NEWER3 = EAGLE3 | {"fc_norm": True, "norm_output": True}
OTHER3 = EAGLE3 | {
    "norm_before_fc": True,
    "norm_before_residual": True,
    "captured_layers": [1, 3, 5],
    "layer": {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-3},
}
P_EAGLE: dict[str, Any] = {"type": "p_eagle", "tokens": 3, "layers": 2}
DFLASH: dict[str, Any] = {"type": "dflash", "layers": 2, "block": 4, "taps": [0, 2]}
DFLASH2 = DFLASH | {"type": "dflash2", "rank": 8, "candidates": 5}
XPRESS = DFLASH | {"type": "xpress", "rank": 8}
DOMINO = DFLASH | {"type": "domino", "block": 3, "gru": 6, "rank": 8}
DSPARK: dict[str, Any] = {"type": "dspark", "layers": 2, "block": 3, "taps": [0, 2], "rank": 8}


def save_target(directory: Path, **shape: Any) -> Target:
    """A tiny target as a model directory, loaded from there."""
    return load_target(str(save_tiny(directory, **SHAPE, **shape)))


def make_heads(
    path: Path,
    target: Target,
    options: dict[str, Any],
    kept: torch.Tensor | None = None,
    moved: float = 0.0,
    **stored: Any,
) -> Heads:
    """A drafter directory. moved: how far from what training starts from; 0 leaves them that, which
    says what the target says of its next token."""
    torch.manual_seed(0)
    heads = new_heads(HeadOptions.of(options), target, kept)
    with torch.no_grad():
        for weight in heads.parameters():
            weight += moved * torch.randn(weight.shape)
    save_heads(path, heads, target=target, **({"provenance": {"stage": "heads"}} | stored))
    heads.borrow(target.model)
    return heads


def make_taught(
    path: Path,
    target: Target,
    options: dict[str, Any],
    reduced: bool = False,
    steps: int = 150,
    **stored: Any,
) -> None:
    """A drafter directory of heads that learnt the target's own texts of PROMPTS by heart, so that
    most of what they draft is accepted, and less if anything of them is read wrongly. reduced: to
    the tokens that occur there."""
    ids, mask = texts_of(target, PROMPTS, 24)
    torch.manual_seed(0)
    heads = new_heads(HeadOptions.of(options), target, ids.unique() if reduced else None)
    with torch.no_grad():  # Attention counts from the beginning, and with it positions.
        for name, weight in heads.named_parameters():
            if "o_proj" in name:
                weight.normal_(std=0.1)
    teach(heads, target, ids, mask, steps=steps)
    save_heads(path, heads, target=target, **({"provenance": {"stage": "heads"}} | stored))


def train_import(
    directory: Path,
    target: Target,
    form: str,
    depth: int | None = None,
    same: str = "",
    steps: int = 10,
) -> Path:
    """Import the published drafter `out` in a directory, train it further, and export it in layout
    `form`; return the new export. depth: of the drafts, None for the layout's. same: the weights
    whose names end so get the values of the first of them."""
    options = ImportOptions(depth=depth)
    import_drafter(str(directory / "out"), target, directory / "imported", options)
    heads = read_heads(directory / "imported", target)
    teach(heads, target, *texts_of(target, PROMPTS, 24), steps=steps)
    if same:
        first, *others = (x for name, x in heads.named_parameters() if name.endswith(same))
        for weight in others:
            weight.data.copy_(first.data)
    save_heads(directory / "tuned", heads, target=target, provenance={"stage": "heads"})
    export_drafter(directory / "tuned", form, directory / "again", ExportOptions(gamma=3))
    return directory / "again"


def distill_import(directory: Path, target: Target, source: Path, **settings: Any) -> Path:
    """Import a small language model, train it for a few steps in a `distill` stage with these
    settings, and return the new drafter's directory."""
    import_drafter(str(source), target, directory / "imported")
    stage = make_stage(
        "distill",
        "tune",
        drafter={"model": str(directory / "imported")},
        loop={"epochs": 2, "tokens_per_batch": 150},
        optimizer={"lr": 1e-4, "warmup_steps": 1},
        **settings,
    )
    tuned = run_stage(stage_context(directory / "stages", target), stage).drafter
    assert tuned is not None
    before, after = (
        load_file(path / "model.safetensors") for path in (directory / "imported", tuned)
    )
    assert not any(torch.equal(before[name], after[name]) for name in before)
    return tuned


def texts_of(
    target: Target, prompts: Sequence[list[int]], new: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The prompts with the target's own answers, int64 [N, T], and which tokens there are."""
    answers = plain_texts(target.model, prompts, new, eos_token_ids=target.eos_token_ids)
    texts = [torch.tensor([*prompt, *text]) for prompt, text in zip(prompts, answers, strict=True)]
    ids = pad_sequence(texts, batch_first=True)
    lengths = torch.tensor([len(text) for text in texts])
    return ids, torch.arange(ids.shape[1]) < lengths[:, None]


def teach(
    heads: Heads,
    target: Target,
    ids: torch.Tensor,
    mask: torch.Tensor,
    *,
    steps: int,
    lr: float = 3e-3,
) -> None:
    """Train heads on these texts, int64 [N, T], where mask is true."""
    heads.borrow(target.model)
    training = HeadTraining(heads, WeightedLoss({"cross_entropy": 1.0}), target.model)
    seen = LiveFeatures(target.model, training.captured_layers).features(ids, mask.long(), [])
    optimizer = torch.optim.Adam(heads.parameters(), lr=lr)
    for _ in range(steps):
        loss, _ = training(ids, mask, seen, dict.fromkeys(range(1, heads.depth + 1), 1e-3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def exported(
    path: Path,
    target: Target,
    options: dict[str, Any],
    kept: torch.Tensor | None = None,
    moved: float = 0.0,
    **changes: Any,
) -> Path:
    """The export of `make_heads(…)` for vLLM."""
    make_heads(path / "drafter", target, options, kept, moved)
    measuring = None if kept is None else FEW
    options_of_export = ExportOptions(**changes)
    export_drafter(path / "drafter", "vllm", path / "out", options_of_export, measuring=measuring)
    return path / "out"


def export_for_llama_server(path: Path, file: Path | str, dtype: str | None = None) -> Path:
    """The export of the `drafter` in a directory, for a target in a GGUF file."""
    options = ExportOptions(target=str(file), dtype=dtype)
    export_drafter(path / "drafter", "llama-server", path / "out", options)
    return path / "out"


def reloaded(out: Path, target: Target) -> HeadsDrafter:
    """A checked export in our own loop."""
    drafter = reload_export(out, check_export(out), target)
    assert isinstance(drafter, HeadsDrafter)
    return drafter


def task(target: Target, export: Path, **changes: Any) -> EngineTask:
    """All PROMPTS, γ = 3, 24 tokens each, and no speeds, unless changed."""
    asked = EngineTask(target, target.name, export, PROMPTS, gamma=3, max_new_tokens=24, loads=())
    return replace(asked, **changes)


def assert_drafts_the_same(drafter: Path, out: Path, target: Target) -> None:
    """A drafter directory and its export draft the same tokens, and get the same verdicts."""
    drafters = open_drafter(str(drafter), target), reloaded(out, target)
    loops = (OwnLoop(target, each, PROMPTS[:8], gamma=3, max_new_tokens=24) for each in drafters)
    before, after = (count_drafts(loop, Counting()) for loop in loops)
    assert before == after


def assert_same_counts(verification: ExportVerification) -> None:
    """Sound, and to the token: same drafts, same verdicts."""
    assert verification.failures == []
    assert verification.theirs == verification.ours


def needs(name: str) -> None:
    """Skip the test where the engine is not installed."""
    missing = None if ENGINES[name].version() else f"{name} is not installed"
    require_environment(missing, ENGINES[name].install)


def require_environment(missing: str | None, install: str) -> None:
    """As `needs`, for anything that a test needs. missing: what is not there, or None. install: the
    command that installs it."""
    if missing:
        pytest.skip(f"{missing}; install it with: {install}")


def needs_few_rows(dtype: torch.dtype) -> None:
    """Skip the test where the products of few rows in a dtype do not run."""
    if not few_rows._processor_fits(few_rows.NUMBERS[dtype]):
        pytest.skip(f"this CPU has no products of few rows in {dtype}, or has better ones")
    no_library = "no C++ compiler" if few_rows.library(dtype) is None else None
    require_environment(no_library, "apt-get install g++")


def edit_json(name: str, **changes: Any) -> Callable[[Path], None]:
    """Sets these keys in a directory's JSON file; None takes one away."""

    def edit(directory: Path) -> None:
        values = json.loads((directory / name).read_text("utf-8")) | changes
        kept = {key: value for key, value in values.items() if value is not None}
        (directory / name).write_text(json.dumps(kept), "utf-8")

    return edit


def edit_weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Changes the tensors of a directory's one safetensors file."""

    def edit(directory: Path) -> None:
        (file,) = directory.glob("*.safetensors")
        found = load_file(file)
        change(found)
        save_file(found, file, metadata={"format": "pt"})

    return edit


def rewrite_gguf(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Write a GGUF file again with its keys and tensors changed, both by name."""
    reader = gguf.GGUFReader(path)
    keys = {name: (field.contents(), field) for name, field in reader.fields.items()}
    values = {name: value for name, (value, _) in keys.items()}
    tensors = {tensor.name: tensor.data.copy() for tensor in reader.tensors}
    change(values, tensors)
    writer = gguf.GGUFWriter(path.with_suffix(".new"), values["general.architecture"])
    for name, (_, field) in keys.items():
        if name in values and not name.startswith(("GGUF.", "general.architecture")):
            array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(
                name, values[name], field.types[0], field.types[-1] if array else None
            )
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    finish_gguf(writer)
    path.with_suffix(".new").replace(path)
