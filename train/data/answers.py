"""Reads the answers that a generate stage wrote in parts."""

import json
from pathlib import Path
from typing import Any

from decode.artifact import verify_directory

PART = "part-"


def read_answers(directory: Path) -> list[dict[str, Any]]:
    """All answers of a generate stage: {"id", "sample", "tokens"}, in order.

    Raises UserError (CorruptArtifact) with the name of a damaged part.
    """
    parts = sorted(directory.glob(f"{PART}*"), key=lambda path: int(path.name.removeprefix(PART)))
    answers = []
    for part in parts:
        verify_directory(part)
        lines = (part / "answers.jsonl").read_text().splitlines()
        answers += [json.loads(line) for line in lines]
    return answers
