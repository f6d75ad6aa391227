"""Collects the contents of report.json from a run's directory."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decode.errors import UserError
from train.report.rows import labels
from train.report.words import NONE

FORMAT = 1


def collect(directory: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return the contents of report.json, and the sample texts by row label."""
    config = _read(directory / "config.json")
    kinds = {stage["name"]: stage["kind"] for stage in config.get("stages", [])}
    stages, rows, samples, times = [], [], [], []
    for stage, path in _numbered(directory / "stages", "done.json"):
        summary = _read(path)["summary"]
        stages.append({"name": stage, "kind": kinds.get(stage, NONE), "summary": summary})
        times.append(path.stat().st_mtime)
    for _, path in _numbered(directory / "evaluations", "evaluation.json"):
        row = _read(path)
        samples.append(row.pop("samples", None) or [])
        rows.append({key: row[key] for key in ("stage", "drafter", "order", "evaluation")})
        times.append(path.stat().st_mtime)
    # The time of the last figure, not of the report, so making the report again changes nothing.
    finished = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(max(times))) if times else None
    report = {
        "format": FORMAT,
        "name": config["name"],
        "finished": finished,
        "rows": rows,
        "stages": stages,
        "provenance": _read(directory / "provenance.json"),
        "config": config,
    }
    return report, dict(zip(labels(report), samples, strict=True))


def _numbered(parent: Path, file: str) -> Iterator[tuple[str, Path]]:
    """Yield (NAME, file) for every complete NN-NAME in a directory, ordered by number."""
    found = []
    for entry in parent.iterdir() if parent.is_dir() else ():
        match = re.fullmatch(r"(\d+)-(.+)", entry.name)
        if match and (entry / file).is_file():
            found.append((int(match[1]), match[2], entry / file))
    for _, name, path in sorted(found):
        yield name, path


def _read(path: Path) -> Any:
    try:
        # NaN and infinity are not valid JSON. Such a figure counts as missing.
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the report cannot be made: {path} cannot be read ({error}). Restore it from a copy, "
            "or start the run again under another name."
        ) from error
