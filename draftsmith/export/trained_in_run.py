"""What the run that trained a drafter says of it: its evaluation, and what it was trained on."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.export.trained_drafter import TrainedDrafter, public_name, without_directories
from train.base.run_files import EVALUATION, read_record, stored_rows


def evaluation_in_run(drafter: TrainedDrafter) -> dict[str, Any] | None:
    """Return the evaluation of this drafter in the run that trained it, None if there is none.
    The evaluation of …/stages/NN-NAME/drafter is under …/evaluations."""
    path = drafter.in_run or drafter.path
    run = _run_of(path)
    if run is None:
        return None
    row = stored_rows(run).get((_stage_name(path.resolve().parent), drafter.kind))
    return None if row is None else read_record(row / EVALUATION)["evaluation"]


def training_in_run(drafter: TrainedDrafter) -> dict[str, Any] | None:
    """Return how the run made this drafter, None if its directory is not in a run.

    {command: the words that started the run; data: {split: file}; texts: what the stage learnt
    from, each {name}, and for answers of the target also {answers, prompts, tokens, temperature,
    self_prompts}}. Directories on this machine are left out of all names.
    """
    run = _run_of(drafter.in_run or drafter.path)
    if run is None or not (run / "config.json").exists():
        return None
    config, starts = (read_record(run / name) for name in ("config.json", "provenance.json"))
    names = (drafter.provenance.get("settings") or {}).get("text")
    stages = {stage["name"]: stage for stage in config["stages"]}
    sources = {split: _as_list(config["data"][split]) for split in ("train", "dev", "test")}
    return {
        "command": _command(starts[-1]["argv"]),
        "data": {split: ", ".join(map(public_name, x)) for split, x in sources.items() if x},
        "texts": [_text_in_run(run, stages.get(x, {"name": x})) for x in _as_list(names)],
    }


def _as_list(names: str | list[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else names or []


def _run_of(path: Path) -> Path | None:
    stage = path.resolve().parent
    is_stage = path.name == "drafter" and stage.parent.name == "stages"
    return stage.parents[1] if is_stage else None


def _stage_name(stage: Path) -> str:
    return re.sub(r"^\d+-", "", stage.name)


def _command(argv: list[str]) -> list[str] | None:
    """The command of a run, without directories of this machine. None: it is a program's."""
    words = argv[2:] if argv[1:2] == ["train"] else argv[1:]
    if not words or not words[0].endswith((".yaml", ".yml")):
        return None
    return ["draftsmith", "train", *map(without_directories, words)]


def _text_in_run(run: Path, stage: Mapping[str, Any]) -> dict[str, Any]:
    """A text that a stage learnt from, and if the target wrote it, how much."""
    files = run.glob("stages/*/done.json")
    done = [file for file in files if _stage_name(file.parent) == stage["name"]]
    if stage.get("kind") != "generate" or not done:
        return {"name": stage["name"]}
    summary = read_record(done[0])["summary"]
    return {
        "name": stage["name"],
        **{key: summary[key] for key in ("answers", "prompts", "tokens")},
        "temperature": stage["sampling"]["temperature"],
        "self_prompts": bool(stage["self_prompts"]),
    }
