"""docs/serve_8b.md is followed to its last line, on a small model and vLLM's build for CPUs."""

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks import serve_8b
from benchmarks.shared.walks import page_commands
from decode.base.errors import UserError
from tests.export import needs
from train.engines.child_process import python_of

TEXT = serve_8b.PAGE.read_text("utf-8")
PYTHON = Path("/vllm/bin/python")


def test_every_command_of_the_page_is_run() -> None:
    steps = serve_8b.walk(TEXT, PYTHON)
    commands = "\n".join(command for _, command in steps)
    assert len(steps) == len([c for _, c in page_commands(TEXT) if "&&" not in c]) - 2
    for part in ("doctor", "init", "--dry-run", "export", "speculative-config", "import"):
        assert part in commands
    assert serve_8b.MODEL not in commands
    assert not re.search(r"[ =](~|\$HOME)/", commands)
    assert "start=start" in steps[-1][1]


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("draftsmith doctor", "nvidia-smi", "has 'nvidia-smi --engine"),
        ("--concurrency 1,8,32", "--concurrency 64", "does not have --concurrency 1,8,32"),
    ],
)
def test_a_page_that_changed_is_refused(old: str, new: str, found: str) -> None:
    with pytest.raises(UserError, match=re.escape(found)):
        serve_8b.walk(TEXT.replace(old, new), PYTHON)


@pytest.mark.engine
@pytest.mark.thorough
@pytest.mark.real
@pytest.mark.timeout(1800)
def test_the_page_works_to_its_last_line(tmp_path: Path) -> None:
    needs("vllm")
    found = tmp_path / "found.json"
    serve_8b.main(python_of("vllm"), quick=True, json_file=found, keep=tmp_path / "walk")
    steps = {
        step["title"]: step["output"] for step in json.loads(found.read_text("utf-8"))["steps"]
    }
    assert len(steps) == len(serve_8b.walk(TEXT, Path(sys.executable)))
    accepted = re.search(r"num_accepted_tokens_total\S* ([\d.]+)", steps["Serve: vllm serve"])
    assert accepted is not None
