"""What tests of exports share: a tiny target that vLLM can run too, heads on it, and engines."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decode.target import Target, load_target
from heads.base import HeadOptions, Heads
from heads.drafter import HeadsDrafter
from heads.store import new_heads, save_heads
from tests.tiny import VOCAB, save_tiny
from train.export.engines import ENGINES, Task
from train.export.write import Measuring, check_export, export_drafter, reload

PROMPTS = [[3 + i, 17 + i, 250 - i, 9, 42 + i][: 2 + i % 4] for i in range(40)]
# Attention heads of 32 numbers, the least that vLLM has kernels for.
SHAPE: dict[str, Any] = {"hidden": 64, "heads": 2, "kv_heads": 2}
KEPT = torch.arange(0, VOCAB, 2)
# So few tokens that nothing can be lost by those that are filled in.
FEW = Measuring(lambda target: PROMPTS[:4], max_new_tokens=3)


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
    save_heads(path, heads, target=target, provenance={"stage": "heads"}, **stored)
    heads.borrow(target.model)
    return heads


def exported(
    path: Path,
    target: Target,
    options: dict[str, Any],
    kept: torch.Tensor | None = None,
    moved: float = 0.0,
    **asked: Any,
) -> Path:
    """The export of `make_heads(…)` for vLLM."""
    make_heads(path / "drafter", target, options, kept, moved)
    measuring = None if kept is None else FEW
    export_drafter(path / "drafter", "vllm", path / "out", measuring=measuring, **asked)
    return path / "out"


def reloaded(out: Path, target: Target) -> HeadsDrafter:
    """A checked export in our own loop."""
    drafter = reload(out, check_export(out), target)
    assert isinstance(drafter, HeadsDrafter)
    return drafter


def task(target: Target, export: Path, **changes: Any) -> Task:
    """All PROMPTS, γ = 3, 24 tokens each, unless changed."""
    asked = Task(target, target.name, export, PROMPTS, gamma=3, max_new_tokens=24)
    return replace(asked, **changes)


def needs(name: str) -> None:
    """Skip the test where the engine is not installed; fail it where DRAFTSMITH_NEED_ENGINES, names
    with spaces between them, says that it must be."""
    missing = ENGINES[name].missing()
    if missing:
        says = f"{missing}; install it with: {ENGINES[name].install}"
        if name in os.environ.get("DRAFTSMITH_NEED_ENGINES", "").split():
            pytest.fail(says)
        pytest.skip(says)


def edit_json(name: str, **changes: Any) -> Callable[[Path], None]:
    """Sets these keys in a directory's JSON file; None takes one away."""

    def edit(directory: Path) -> None:
        values = json.loads((directory / name).read_text()) | changes
        kept = {key: value for key, value in values.items() if value is not None}
        (directory / name).write_text(json.dumps(kept))

    return edit


def edit_weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Changes the tensors of a directory's one safetensors file."""

    def edit(directory: Path) -> None:
        (file,) = directory.glob("*.safetensors")
        found = load_file(file)
        change(found)
        save_file(found, file, metadata={"format": "pt"})

    return edit
