"""A run of one small stage, as a program describes it: heads on a tiny target."""

from pathlib import Path
from typing import Any

import pytest

from tests.tiny import save_tiny, write_rows
from tests.training import begin_anew

STAGE = {
    "name": "heads",
    "kind": "heads",
    "text": "data",
    "heads": {"type": "medusa", "heads": 2},
    "loop": {"max_steps": 4, "tokens_per_batch": 80},
    "optimizer": {"lr": 1e-2, "warmup_steps": 1},
}


def make_first_run(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a directory with a target and rows for `settings`."""
    begin_anew()
    monkeypatch.chdir(directory)
    save_tiny(directory / "target", "llama")
    rows = [{"prompt": f"the dog {i}", "response": f"it sells shells {i}"} for i in range(30)]
    write_rows(directory / "rows.jsonl", rows)
    return directory


def settings(base: Path, **changes: Any) -> dict[str, Any]:
    """A run of one stage, as a program writes it: with a path, and tuples."""
    evaluation = {"prompts": 3, "timed_prompts": 0, "max_new_tokens": 6, "baselines": ()}
    return {
        "name": "first",
        "trackers": (),
        "target": {"model": base / "target", "dtype": "float32", "device": "cpu"},
        "data": {"train": "rows.jsonl", "duplicates": "keep"},
        "evaluation": evaluation | {"in_turn": ()},
        "stages": (STAGE,),
    } | changes
