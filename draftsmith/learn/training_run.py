"""What a cycle trains and judges with: a tenant's records, a run, and the loop."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from decode.base.artifact import write_file
from decode.base.errors import UserError
from decode.measure.evaluation import evaluate
from decode.model.loading import Target
from decode.opening.directory import open_drafter
from draftsmith.learn.learn_config import LearnConfig
from train.base.config_file import read_config
from train.base.console import Reporter
from train.data.read import Example, read_examples
from train.run.config import RunConfig, build_config
from train.run.run import Run

SERVING = "{serving}"
TRAIN, HELD_OUT = "train.jsonl", "held_out.jsonl"


def usable(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records to learn from. In an answer with a part taken out, the target's distribution is
    not that of the text."""
    return [record for record in records if not record["redacted"]["answer"]]


def split_by_time(
    records: Sequence[dict[str, Any]], held_out: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(for training, held out): the newest are held out. An earlier record with the prompt of a
    held-out one is in neither: its answer would tell how to draft the other."""
    judged = list(records[-held_out:])
    prompts = {json.dumps(record["messages"][:-1]) for record in judged}
    earlier = records[: len(records) - len(judged)]
    return [r for r in earlier if json.dumps(r["messages"][:-1]) not in prompts], judged


def write_rows(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write records as rows that `train.data.read` takes."""
    lines = (json.dumps({"id": r["id"], "messages": r["messages"]}) + "\n" for r in records)
    write_file(path, "".join(lines))


def run_settings(config: LearnConfig, work: Path, serving: Path, name: str) -> RunConfig:
    """The config of a cycle's run. work: its directory. Raises UserError for one that does not
    fit a cycle."""
    source = read_config(
        Path(config.run),
        (
            f"name={name}",
            f"output_dir={work}",
            f"data.train={work / TRAIN}",
            f"data.test={work / HELD_OUT}",
            "evaluation.split=test",
            "evaluation.stages=[]",
            "evaluation.baselines=[]",
        ),
    )
    source.values = _replaced(source.values, str(serving))
    settings = build_config(source)
    for stage in settings.stages:
        if getattr(stage, "backbone", None) is not None:
            raise UserError(
                f"{config.run}: stage {stage.name} trains the target too, but a cycle changes only "
                "the drafter; leave backbone out"
            )
    return settings


def _replaced(value: Any, serving: str) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(item, serving) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, serving) for item in value]
    return value.replace(SERVING, serving) if isinstance(value, str) else value


class TrainingRun:
    """The run of one cycle, which goes on where a kill stopped it.

    work: its directory. serving: the drafter that answers now. name: the name of the run.
    accelerator: makes this process's part of the run. loaded: the target, if it is loaded
    already."""

    def __init__(
        self,
        config: LearnConfig,
        work: Path,
        serving: Path,
        name: str,
        reporter: Reporter,
        accelerator: Callable[[RunConfig], Accelerator],
        loaded: Target | None = None,
    ) -> None:
        self.config, self.work, self.serving = config, work, serving
        settings = run_settings(config, work, serving, name)
        self.run = Run(settings, accelerator(settings), reporter, loaded=loaded)

    def write(self, records: Sequence[dict[str, Any]]) -> tuple[int, int]:
        """Write the rows to learn from and those to judge with; how many of each. Raises UserError
        if there are none. Held-out prompts that do not fit the target's context are left out."""
        train, held_out = split_by_time(records, self.config.held_out)
        write_rows(self.work / HELD_OUT, held_out)
        fitting = {e.id for e, ids in self._prompts() if len(ids) <= self._room}
        held_out = [record for record in held_out if record["id"] in fitting]
        if not held_out or not train:
            raise UserError(
                f"{len(train)} records are left to learn from, and {len(held_out)} of at most "
                f"{self._room} tokens to judge with; record more requests"
            )
        write_rows(self.work / HELD_OUT, held_out)
        write_rows(self.work / TRAIN, train)
        return len(train), len(held_out)

    def train(self, result: Path) -> None:
        """Train a drafter and copy it to `result`."""
        self.run.execute()
        drafters = list(self.run.drafters.values())
        if not drafters:
            raise UserError(f"{self.config.run} has no stage that makes a drafter; add one")
        shutil.rmtree(result, ignore_errors=True)
        shutil.copytree(drafters[-1], result)

    def efficiency(self, drafter: Path) -> float:
        """Accepted ÷ drafted on the held-out prompts in our loop, in chains, as engines draft."""
        target = self.run.target
        protocol = replace(
            self.run.config.evaluation.protocol(self.config.gamma),
            shape="chain",
            rule=None,
            policy="fixed",
            max_new_tokens=self.config.max_new_tokens,
            timed_prompts=0,
            generate=False,
        )
        opened = open_drafter(str(drafter), target)
        return evaluate(target, opened, self.prompts(), protocol).counts.draft_efficiency

    def prompts(self) -> list[list[int]]:
        """The held-out prompts as token ids."""
        return [ids for _, ids in self._prompts()]

    def _prompts(self) -> list[tuple[Example, list[int]]]:
        examples, _ = read_examples(str(self.work / HELD_OUT))
        return list(zip(examples, self.run.prompts(examples), strict=True))

    @property
    def _room(self) -> int:
        """The longest prompt that can be judged, in tokens."""
        return self.run.target.max_positions - self.config.max_new_tokens - self.config.gamma
