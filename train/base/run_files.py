"""The files of a run directory that a report is made of: which belong to it, in which order."""

import glob
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decode.base.errors import UserError

EVALUATIONS, EVALUATION = "evaluations", "evaluation.json"
BEFORE = "before"  # the stage of an untrained drafter
STAGES = "stages"
TEXTS, TEXT = "texts", "text.json"  # texts as tokens; the name of the one that a stage read
FORECASTS, FORECAST = "-forecast", "forecast.json"
START = " (start)"  # of a drafter before its training, after the stage's name

# (stage, kind of drafter): unique in a run
Key = tuple[str, str]


def stage_directory(run: Path, name: str, number: int) -> Path:
    """The directory of a run's stage, the `number`-th of its config. The stage keeps the directory
    in which it began, also if the config later has other stages before it."""
    planned = run / STAGES / f"{number:02d}-{name}"
    if planned.is_dir():
        return planned
    begun = (run / STAGES).glob(f"*-{glob.escape(name)}")
    named = re.compile(rf"\d+-{re.escape(name)}")
    return next((path for path in sorted(begun) if named.fullmatch(path.name)), planned)


def stored_rows(run: Path) -> dict[Key, Path]:
    """The directory of each complete evaluation. Of two with one key, as earlier versions may have
    left them, the newer one counts. Raises UserError for a record that cannot be read."""
    files = (run / EVALUATIONS).glob(f"[!.]*/{EVALUATION}")
    rows: dict[Key, Path] = {}
    for file in sorted(files, key=lambda file: file.stat().st_mtime):
        record = read_record(file)
        rows[record["stage"], record["drafter"]] = file.parent
    return rows


def read_record(path: Path) -> Any:
    """The JSON value of a file of a run. Raises UserError if it cannot be read."""
    try:
        # NaN and infinity are not valid JSON. Such a figure counts as missing.
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read ({error}). Restore it from a copy, or start the run again "
            "under another name."
        ) from error


def forecast_of(run: Path) -> Path:
    """The file of the forecast of a run, beside the run's directory."""
    return run.with_name(f"{run.name}{FORECASTS}") / FORECAST


def stored_forecast(run: Path) -> Any:
    """What `draftsmith forecast` said of a run before its training. None: there is no forecast."""
    file = forecast_of(run)
    return read_record(file) if file.is_file() else None


def row_directories(config: Mapping[str, Any], stored: Mapping[Key, Path]) -> list[Path]:
    """The directories of the rows that the config has, in its order: the baselines, the drafters of
    each stage, and the last of them combined with untrained ones. config: as in config.json."""
    evaluation = config.get("evaluation", {})
    rows = [stored.get((BEFORE, name)) for name in evaluation.get("baselines", [])]
    last = None
    for stage in (entry["name"] for entry in config.get("stages", [])):
        if stage in (evaluation.get("stages") or [stage]):
            found = [*_of(stored, f"{stage}{START}"), *_of(stored, stage)]
            rows += found
            last = stage if found else last
    for setting, plus in (("in_turn", "+"), ("in_one_tree", "++")):
        for name in evaluation.get(setting, []):
            rows += _of(stored, f"{name}{plus}{last}")
    # A stage may have the name that the rows of untrained drafters have.
    return [row for row in dict.fromkeys(rows) if row is not None]


def _of(stored: Mapping[Key, Path], stage: str) -> list[Path]:
    return [path for (other, _), path in stored.items() if other == stage]
