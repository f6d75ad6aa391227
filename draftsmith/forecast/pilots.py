"""Small trainings of a run's stages: each is a run of its own, on a part of the run's data.

They have the run's prompts for evaluations, and each stage the same number of passes over less
text. So a training on a share of the data stands for the whole one as a point of a curve.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from decode.base.artifact import write_file
from draftsmith.forecast.curve import Point, spread_of
from train.data.read import Example, spread
from train.run.config import RunConfig, dump_config
from train.run.config_checks import validate_config
from train.run.run import Run, Splits

# Rows of the smallest training; and the share of the data that the largest may have.
FEWEST_ROWS, LARGEST_SHARE = 48, 0.5
BARE_PROMPTS, BARE_TOKENS = 2, 16  # of what is made only to be weighed
DOUBT = 1.05  # a training may take so much longer than others say
# Half the width of a 95% interval in standard errors.
WIDTH = 1.96


@dataclass(frozen=True)
class PilotResult:
    """What was measured of a drafter. spec: its name, or its directory. width: tokens that a pass
    verifies on average, the last one of the text included. seconds: of its own stage. target: the
    directory of its new target; None: that of the run."""

    spec: str
    point: Point
    width: float
    tokens_per_step: float
    seconds: float = 0.0
    target: Path | None = None

    @property
    def depth(self) -> int:
        """The places of a draft."""
        return len(self.point.reached)

    @classmethod
    def of(
        cls,
        spec: str,
        found: Mapping[str, Any],
        rows: int,
        seconds: float = 0.0,
        target: Path | None = None,
    ) -> "PilotResult":
        """found: the figures of an evaluation, as JSON values. rows: that it was trained on."""
        reached = np.array(found["reached_by_position"], dtype=np.float64)
        rates = [rate or 0.0 for rate in found["acceptance_by_position"]]
        accepted = reached * np.array(rates)
        # A step whose draft is shorter, or that has none, accepts nothing at a place either.
        reached = np.append(float(found["steps"]), accepted)[: len(reached)]
        interval = found["tokens_per_step_interval"] or {}
        error = (interval.get("high", 0.0) - interval.get("low", 0.0)) / (2 * WIDTH)
        spread = spread_of(reached, accepted, found["steps"], error)
        return cls(
            spec,
            Point(rows, reached, accepted, spread),
            1 + found["nodes_per_step"],
            found["tokens_per_step"],
            seconds,
            target,
        )


@dataclass(frozen=True)
class Pilot:
    """A finished small run. rows: of its train split. seconds: of its stages. judging_seconds: of
    its evaluations, which all trainings have alike. shared_seconds: of the stages that make no
    drafter. drafters: by stage."""

    rows: int
    seconds: float
    judging_seconds: float
    shared_seconds: float
    drafters: Mapping[str, PilotResult]


def next_rows(
    total: int, done: Sequence[tuple[int, float]], left: float, judging: float = 0.0
) -> int | None:
    """The rows of the next small training: the most that should take half of the seconds that are
    left, or twice those of the last one if that fits. None: no more fits into time or data.

    total: rows of the whole split. done: (rows, seconds) of the trainings so far, ascending.
    judging: seconds of the evaluations of each, whatever its rows.

    >>> next_rows(10_000, [(48, 10.0)], 800.0), next_rows(10_000, [(48, 10.0)], 30.0)
    (1536, 96)
    """
    sizes = list[int]()
    while (rows := 2 * (sizes or [done[-1][0]])[-1]) <= total * LARGEST_SHARE:
        sizes.append(rows)
    taken = {rows: DOUBT * (seconds_at(rows, done) + judging) for rows in sizes}
    half = [rows for rows in sizes if taken[rows] <= left / 2]
    twice = [rows for rows in sizes[:1] if taken[rows] <= left]
    return max(half + twice, default=None)


def write_data(splits: Splits, rows: int, directory: Path) -> dict[str, str]:
    """Write the rows of a pilot, spread over the train split, as large a part of the stream, and
    the other splits as they are. Returns the files by split."""
    files, total = {}, len(splits["train"])
    for split, examples in splits.items():
        part = split in ("train", "stream")
        some = spread(examples, -(-len(examples) * rows // total)) if part else examples
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
    config: RunConfig, files: Mapping[str, str], share: float, directory: Path, *, bare: bool
) -> RunConfig:
    """The config of a small run on these files, which takes no times. share: of the data that it
    has. directory: of the run. bare: it makes drafters that learn nothing, and are only weighed."""
    values = dump_config(config)
    data = dict.fromkeys(("dev", "test", "stream", "limit")) | dict(files)
    values["data"] |= data | {"duplicates": "keep"}
    values |= {"name": directory.name, "output_dir": str(directory.parent), "trackers": []}
    for stage in values["stages"]:
        if stage["kind"] == "generate" and stage["prompts"] and stage["split"] == "train":
            stage["prompts"] = max(1, round(stage["prompts"] * share))
        if bare and stage["kind"] == "generate":
            stage["max_new_tokens"] = min(stage["max_new_tokens"], BARE_TOKENS)
        loop = stage.get("loop") or {}
        if loop and bare:
            loop["max_steps"] = 1
        elif loop.get("max_steps"):
            loop["max_steps"] = max(1, round(loop["max_steps"] * share))
        if loop.get("max_minutes"):
            loop["max_minutes"] *= share
        if optimizer := stage.get("optimizer"):
            optimizer["warmup_steps"] = round(optimizer["warmup_steps"] * share)
    for untrained in ("baselines", "in_turn", "in_one_tree"):
        values["evaluation"][untrained] = []
    values["evaluation"] |= {"timed_prompts": 0, "generate": False}
    if bare:
        values["evaluation"] |= {"prompts": BARE_PROMPTS, "max_new_tokens": BARE_TOKENS}
    return validate_config(values, base_dir=Path())


def read_pilot(run: Run, rows: int) -> Pilot:
    """What a finished small run measured."""
    report, drafters = run.report, run.drafters

    def new_target(stage: str) -> Path | None:
        target = drafters[stage].parent / "target"
        return target if target.is_dir() else None

    seconds = {stage["name"]: stage["summary"]["seconds"] for stage in report["stages"]}
    return Pilot(
        rows,
        seconds=sum(seconds.values()),
        judging_seconds=sum(row["seconds"] for row in report["rows"]),
        shared_seconds=sum(taken for name, taken in seconds.items() if name not in drafters),
        drafters={
            name: PilotResult.of(
                str(drafters[name]),
                row["evaluation"],
                rows,
                seconds[name],
                new_target(name),
            )
            for row in report["rows"]
            if (name := row["stage"]) in drafters
        },
    )


def seconds_at(rows: int, pilots: Sequence[tuple[int, float]]) -> float:
    """Seconds of a work on so many rows, by a line through the last two of (rows, seconds), which
    never falls; by one of them, in proportion.

    >>> seconds_at(100, [(10, 3.0), (20, 4.0)]), seconds_at(100, [(10, 3.0)])
    (12.0, 30.0)
    """
    (few, less), (many, more) = [(0, 0.0), *pilots][-2:]
    return more + max(more - less, 0.0) / (many - few) * (rows - many)
