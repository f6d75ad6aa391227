"""Small trainings of a run's stages: each is a run of its own, on a part of the run's data.

They have the run's prompts for evaluations, and each stage the same number of passes over less
text. So a training on a share of the data stands for the whole one as a point of a curve.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from decode.base.artifact import write_file
from decode.base.errors import UserError
from draftsmith.forecast.curve import Point, spread_of
from train.data.read import Example, spread
from train.run.config import RunConfig, dump_config
from train.run.config_checks import validate_config
from train.run.run import Run, Splits

# Rows of the smallest training, at least; and the share of the data that the largest may have.
FEWEST_ROWS, LARGEST_SHARE = 48, 0.5
SIZES = 64  # the smallest has this part of the rows, if those are enough
# Half the width of a 95% interval in standard errors.
WIDTH = 1.96


@dataclass(frozen=True)
class Outcome:
    """What was measured of a drafter. spec: its name, or its directory. width: tokens that a pass
    verifies on average, the last one of the text included. seconds: of its own stage."""

    spec: str
    point: Point
    width: float
    tokens_per_step: float
    seconds: float = 0.0

    @classmethod
    def of(cls, spec: str, found: Mapping[str, Any], share: float, seconds: float) -> "Outcome":
        """found: the figures of an evaluation, as JSON values. share: of the data."""
        reached = np.array(found["reached_by_position"], dtype=np.float64)
        rates = [rate or 0.0 for rate in found["acceptance_by_position"]]
        accepted = reached * np.array(rates)
        interval = found["tokens_per_step_interval"] or {}
        error = (interval.get("high", 0.0) - interval.get("low", 0.0)) / (2 * WIDTH)
        spread = spread_of(reached, accepted, found["steps"], error)
        return cls(
            spec,
            Point(share, reached, accepted, spread),
            1 + found["nodes_per_step"],
            found["tokens_per_step"],
            seconds,
        )


@dataclass(frozen=True)
class Pilot:
    """A finished small run. rows: of its train split. seconds: of all that it did. shared_seconds:
    of the stages that make no drafter. drafters: by stage."""

    rows: int
    seconds: float
    shared_seconds: float
    drafters: Mapping[str, Outcome]


def sizes_of(rows: int) -> list[int]:
    """The numbers of rows of the trainings that could be tried, ascending. Raises UserError if
    there are too few for two of them.

    >>> sizes_of(1000)
    [48, 96, 192, 384]
    """
    first, sizes = max(FEWEST_ROWS, math.ceil(rows / SIZES)), list[int]()
    while first <= rows * LARGEST_SHARE:
        sizes.append(first)
        first *= 2
    if len(sizes) < 2:
        raise UserError(
            f"the train split has {rows} rows; a curve needs two trainings on {FEWEST_ROWS} and "
            f"{2 * FEWEST_ROWS} of them that are at most half of all, so at least "
            f"{4 * FEWEST_ROWS}: train on all of it, which takes little time, and read the report"
        )
    return sizes


def write_data(splits: Splits, rows: int, directory: Path) -> dict[str, str]:
    """Write the rows of a pilot, spread over the train split, and the other splits as they are.
    Returns the files by split."""
    files = {}
    for split, examples in splits.items():
        some = spread(examples, rows) if split == "train" else examples
        lines = "".join(json.dumps(as_row(one), ensure_ascii=True) + "\n" for one in some)
        path = directory / f"{split}.jsonl"
        write_file(path, lines)
        files[split] = str(path.absolute())
    return files


def as_row(example: Example) -> dict[str, Any]:
    """A row that is read as this example."""
    row: dict[str, Any] = {"id": example.id}
    if example.messages is None:
        row |= {"text": example.text} if example.text is not None else {"prompt": example.prompt}
    else:
        row["messages"] = list(example.messages)
    optional = {
        "kind": example.kind,
        "tools": list(example.tools) or None,
        "json_schema": None if example.schema is None else json.loads(example.schema),
    }
    return row | {key: value for key, value in optional.items() if value is not None}


def pilot_config(
    config: RunConfig, files: Mapping[str, str], share: float, directory: Path
) -> RunConfig:
    """The config of a small run on these files, which takes no times. share: of the data that it
    has. directory: of the run."""
    values = dump_config(config)
    data = dict.fromkeys(("dev", "test", "stream", "limit")) | dict(files)
    values["data"] |= data | {"duplicates": "keep"}
    values |= {"name": directory.name, "output_dir": str(directory.parent), "trackers": []}
    for stage in values["stages"]:
        if stage["kind"] == "generate" and stage["prompts"] and stage["split"] == "train":
            stage["prompts"] = max(1, round(stage["prompts"] * share))
        loop = stage.get("loop") or {}
        if loop.get("max_steps"):
            loop["max_steps"] = max(1, round(loop["max_steps"] * share))
        if loop.get("max_minutes"):
            loop["max_minutes"] *= share
    for untrained in ("baselines", "in_turn", "in_one_tree"):
        values["evaluation"][untrained] = []
    values["evaluation"] |= {"timed_prompts": 0, "generate": False}
    return validate_config(values, base_dir=Path())


def read_pilot(run: Run, rows: int, total: int) -> Pilot:
    """What a finished small run measured. total: rows of the whole train split."""
    report, drafters = run.report, run.drafters
    seconds = {stage["name"]: stage["summary"]["seconds"] for stage in report["stages"]}
    return Pilot(
        rows,
        seconds=sum(seconds.values()) + sum(row["seconds"] for row in report["rows"]),
        shared_seconds=sum(taken for name, taken in seconds.items() if name not in drafters),
        drafters={
            row["stage"]: Outcome.of(
                str(drafters[row["stage"]]), row["evaluation"], rows / total, seconds[row["stage"]]
            )
            for row in report["rows"]
            if row["stage"] in drafters
        },
    )


def seconds_at(rows: int, pilots: Sequence[tuple[int, float]]) -> float:
    """Seconds of a work on so many rows, by a line through the last two of (rows, seconds), which
    never falls.

    >>> seconds_at(100, [(10, 3.0), (20, 4.0)])
    12.0
    """
    (few, less), (many, more) = pilots[-2:]
    return more + max(more - less, 0.0) / (many - few) * (rows - many)
