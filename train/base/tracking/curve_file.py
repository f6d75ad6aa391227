"""The figures that a run logs, in a file of its own: `logs/curves.jsonl`.

Each line is a JSON object. `{"stage", "step", "run_step", "figures"}` holds figures by name.
`{"stage", "continued_after"}` says that a stage went on from a checkpoint: what was logged for its
later steps does not count, because these steps are done again. Lines are only appended, so a
program may read the file while the run writes it.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CURVES_FILE = "curves.jsonl"

# By step.
Points = dict[int, float]


class CurveReader:
    """Reads a file of curves again and again. A call of `read` reads only what is new."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # By stage, then by the name of the figure.
        self.curves: dict[str, dict[str, Points]] = {}
        # By stage: the run's step at the stage's step 0.
        self.starts: dict[str, int] = {}
        self.last_run_step = 0
        self._bytes = 0

    def read(self) -> dict[str, dict[str, Points]]:
        """The points by stage, by name and by step. A line that is not complete yet is left for
        the next call. A damaged line is passed over. {} if there is no file."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._bytes)
                complete, newline, _ = file.read().rpartition(b"\n")
        except OSError:
            return self.curves
        self._bytes += len(complete) + len(newline)
        for line in complete.splitlines():
            try:
                self._add(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
        return self.curves

    def steps(self, stage: str) -> set[int]:
        """The steps of a stage for which figures are logged."""
        return {step for points in self.curves.get(stage, {}).values() for step in points}

    def _add(self, line: dict[str, Any]) -> None:
        stage = str(line["stage"])
        curves = self.curves.setdefault(stage, {})
        if isinstance(kept := line.get("continued_after"), int):
            for points in curves.values():
                for step in [step for step in points if step > kept]:
                    del points[step]
            return
        step, run_step, figures = line["step"], line["run_step"], line["figures"]
        if isinstance(step, int) and isinstance(run_step, int) and isinstance(figures, dict):
            self.starts.setdefault(stage, run_step - step)
            self.last_run_step = max(self.last_run_step, run_step)
            for name, value in figures.items():
                curves.setdefault(name, {})[step] = float(value)


class CurveWriter:
    """Appends to a file of curves, which an earlier start of the run may have begun.

    A stage counts its steps from 0, but trackers expect steps that never fall. So every step also
    has a number in the run: a stage begins after the last step that was logged before it, and keeps
    that place when the run continues.
    """

    def __init__(self, path: Path) -> None:
        self._reader = CurveReader(path)
        self._reader.read()
        self._end_line()

    def continue_after(self, stage: str, step: int) -> None:
        """From now on, figures that were logged for later steps of this stage do not count."""
        self._reader.read()
        if any(logged > step for logged in self._reader.steps(stage)):
            self._append({"stage": stage, "continued_after": step})

    def append(self, stage: str, step: int, figures: Mapping[str, float]) -> int:
        """Log figures at a step of a stage. Those that are not finite are left out, because JSON
        has no such numbers. Returns the step's number in the run."""
        self._reader.read()
        run_step = self._reader.starts.get(stage, self._reader.last_run_step) + step
        finite = {name: value for name, value in figures.items() if math.isfinite(value)}
        self._append({"stage": stage, "step": step, "run_step": run_step, "figures": finite})
        return run_step

    def _append(self, line: dict[str, Any]) -> None:
        with self._reader.path.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")

    def _end_line(self) -> None:
        """End a line that a killed process left incomplete."""
        path = self._reader.path
        if path.is_file() and (text := path.read_bytes()) and not text.endswith(b"\n"):
            with path.open("ab") as file:
                file.write(b"\n")
