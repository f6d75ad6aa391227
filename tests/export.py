"""What tests of exports share: a tiny target that vLLM can run too, and engines."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decode.target import Target, load_target
from tests.tiny import save_tiny
from train.export.engines import ENGINES, Task

PROMPTS = [[3 + i, 17 + i, 250 - i, 9, 42 + i][: 2 + i % 4] for i in range(40)]
# Attention heads of 32 numbers, the least that vLLM has kernels for.
SHAPE: dict[str, Any] = {"hidden": 64, "heads": 2, "kv_heads": 2}


def save_target(directory: Path) -> Target:
    """A tiny target as a model directory, loaded from there."""
    return load_target(str(save_tiny(directory, **SHAPE)))


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
