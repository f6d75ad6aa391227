"""What a run has done so far and does now, read from its directory. Nothing is written."""

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from decode.base.errors import UserError
from train.base.console import LOG_FILE, PROGRESS_FILE
from train.base.run_files import (
    EVALUATION,
    read_record,
    row_directories,
    stage_directory,
    stored_rows,
)
from train.base.tracking.curve_file import CURVES_FILE, CurveReader, Points

LOG_LINES, LOG_BYTES = 200, 1 << 16
POINTS = 300  # of a curve
# The logged figures that are drawn, by their names.
CURVES = {
    "loss": re.compile(r"loss"),
    "agreement": re.compile(r"dev/(?:head\d+/)?top1|dev/expected_acceptance"),
    "tokens per step": re.compile(r"dev/tokens_per_step"),
    "tokens/s": re.compile(r"tokens_per_second"),
    "model TFLOP/s": re.compile(r"model_tflops_per_second"),
    "MFU": re.compile(r"mfu"),
    "memory, GiB": re.compile(r"memory_gib"),
}
FIGURES = ("acceptance_rate", "tokens_per_step", "speedup", "lossless", "alone")


class RunState:
    """Reads a run's directory again and again. A call reads only what is new of the logged figures.

    Raises UserError if the directory is not that of a run.
    """

    def __init__(self, directory: Path) -> None:
        if not (directory / "config.json").is_file():
            raise UserError(
                f"{directory} has no config.json; expected the directory of a run that has begun"
            )
        self.directory = directory
        self._reader = CurveReader(directory / "logs" / CURVES_FILE)

    def read(self) -> dict[str, Any]:
        """The state as JSON values.

        stages: each {name, kind, state: done, begun or waiting, seconds, peak_memory_bytes}.
        progress: {what, done, total, note, seconds_left, run_seconds_left, age} or None; age:
        seconds since it was written. curves: each {stage, figure, lines: {name: [[step, value],
        …]}}, those of the last stage first. evaluations: each {stage, drafter} with FIGURES. log:
        the last LOG_LINES lines.
        """
        config = _json(self.directory / "config.json") or {}
        stages = self._stages(config)
        return {
            "name": str(config.get("name")),
            "directory": str(self.directory),
            "target": str((config.get("target") or {}).get("model")),
            "stages": stages,
            "finished": all(stage["state"] == "done" for stage in stages)
            and (self.directory / "report.json").is_file(),
            "progress": self._progress(),
            "curves": self._curves([stage["name"] for stage in stages]),
            "evaluations": list(self._evaluations(config)),
            "log": self._log(),
        }

    def _stages(self, config: dict[str, Any]) -> list[dict[str, Any]]:
        stages = []
        for index, stage in enumerate(config.get("stages") or []):
            directory = stage_directory(self.directory, stage["name"], index)
            done = _json(directory / "done.json")
            state = "done" if done else "begun" if directory.is_dir() else "waiting"
            summary = (done or {}).get("summary") or {}
            figures = {key: summary.get(key) for key in ("seconds", "peak_memory_bytes")}
            stages.append({"name": stage["name"], "kind": stage["kind"], "state": state, **figures})
        return stages

    def _progress(self) -> dict[str, Any] | None:
        progress: dict[str, Any] | None = _json(self.directory / "logs" / PROGRESS_FILE)
        if progress is None:
            return None
        return progress | {"age": max(time.time() - progress.pop("time"), 0.0)}

    def _curves(self, stages: list[str]) -> list[dict[str, Any]]:
        logged = self._reader.read()
        curves = []
        for stage in reversed(stages):
            for figure, pattern in CURVES.items():
                lines = {
                    name: _thinned(points)
                    for name, points in sorted(logged.get(stage, {}).items())
                    if points and pattern.fullmatch(name)
                }
                if lines:
                    curves.append({"stage": stage, "figure": figure, "lines": lines})
        return curves

    def _evaluations(self, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with suppress(UserError):  # it is being written
            for path in row_directories(config, stored_rows(self.directory)):
                row = read_record(path / EVALUATION)
                figures = {key: row["evaluation"].get(key) for key in FIGURES}
                yield {"stage": row["stage"], "drafter": row["drafter"], **figures}

    def _log(self) -> list[str]:
        path = self.directory / "logs" / LOG_FILE
        if not path.is_file():
            return []
        with path.open("rb") as log:
            log.seek(max(path.stat().st_size - LOG_BYTES, 0))
            text = log.read().decode("utf-8", "replace")
        return text.splitlines()[-LOG_LINES:]


def _thinned(points: Points) -> list[tuple[int, float]]:
    """At most about POINTS points, the last one among them."""
    ordered = sorted(points.items())
    stride = -(-len(ordered) // POINTS)
    return ordered[::-1][::stride][::-1]


def _json(path: Path) -> Any:
    """The value in a file. None if there is none, or if it is being written."""
    try:
        return read_record(path)
    except UserError:
        return None
