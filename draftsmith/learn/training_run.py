"""What a cycle trains and judges with: a tenant's records, a run, and the loop."""

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from scipy.special import ndtr, stdtrit

from decode.base.artifact import write_file
from decode.base.errors import UserError
from decode.model.loading import Target
from decode.opening.directory import open_drafter
from decode.stats import Tally
from draftsmith.learn.learn_config import LearnConfig
from train.base.config_file import read_config
from train.base.console import Reporter
from train.data.read import Example, read_examples
from train.measure.evaluation import evaluate
from train.run.config import RunConfig
from train.run.config_checks import build_config
from train.run.run import Run

SERVING = "{serving}"
TRAIN, HELD_OUT = "train.jsonl", "held_out.jsonl"
DRAWS = 2000  # of prompts, for an interval
CERTAINTY = 0.95
# If so few prompts are all better, chance explains it no longer: 2⁻⁶ is below 2.5%.
FEWEST_PROMPTS = 6


def usable(
    records: Sequence[dict[str, Any]], models: Sequence[str] | None = None
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """(The records to learn from, how many are left out, by the reason.) models: the names of the
    target in answers; None: they are not known yet, and all names count."""
    found, left_out = [], Counter[str]()
    for record in records:
        if models is not None and record["model"] not in models:
            left_out[f"they are of another model or an adapter than {' or '.join(models)}"] += 1
        elif record["redacted"]["answer"]:
            # The target's distribution is not that of the text there.
            left_out["a part of their answer was taken out"] += 1
        else:
            found.append(record)
    return found, left_out


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


@dataclass(frozen=True)
class Gain:
    """How much more one drafter is accepted than another, on the same prompts.

    before, after: accepted ÷ drafted of all prompts together. low, high: the interval of after −
    before that is right in CERTAINTY of all cases (the expanded percentile bootstrap, Hesterberg
    2014): each of DRAWS takes as many prompts as there are, with replacement, and the drafts
    of both drafters for them. With fewer than FEWEST_PROMPTS nothing is certain: from −1 to 1.
    """

    before: float
    after: float
    low: float
    high: float

    @classmethod
    def of(cls, before: np.ndarray, after: np.ndarray) -> "Gain":
        """From what each drafter drafted and accepted for each prompt, int64 [prompts, 2] each."""
        count = len(before)
        drawn = np.random.default_rng(0).integers(count, size=(DRAWS, count))
        gains = _rate(after[drawn].sum(1)) - _rate(before[drawn].sum(1))
        rest = _outside(count) if count >= FEWEST_PROMPTS else 0.0
        low, high = np.quantile(gains, (rest, 1 - rest)) if rest else (-1, 1)
        whole = [float(_rate(counts.sum(0))) for counts in (before, after)]
        return cls(whole[0], whole[1], float(low), float(high))

    def __str__(self) -> str:
        return (
            f"{self.after:.3f} on held-out records, the serving one {self.before:.3f}; the gain is "
            f"from {self.low:+.3f} to {self.high:+.3f} at {CERTAINTY:.0%}"
        )


def _outside(count: int) -> float:
    """The share of bootstrap draws below an interval for so many prompts. The draws spread less
    than means do, by √((n − 1) / n), and the spread is an estimate itself (Student's t)."""
    t = stdtrit(count - 1, (1 + CERTAINTY) / 2)
    return float(ndtr(-t * math.sqrt(count / (count - 1))))


def _rate(counts: np.ndarray) -> np.ndarray:
    """Accepted ÷ drafted. counts: [..., 2]. Nothing drafted is nothing accepted."""
    return np.asarray(counts[..., 1] / np.maximum(counts[..., 0], 1))


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
        """Write the rows to learn from and those to judge with; how many of each. Held-out prompts
        that do not fit the target's context are left out."""
        train, held_out = split_by_time(records, self.config.held_out)
        write_rows(self.work / HELD_OUT, held_out)
        prompts = self._prompts() if held_out else []  # a file without rows is a fault
        fitting = {e.id for e, ids in prompts if len(ids) <= self._room}
        held_out = [record for record in held_out if record["id"] in fitting]
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

    def drafts(self, drafter: Path) -> np.ndarray:
        """int64 [prompts, 2]: the tokens drafted and accepted for each held-out prompt in our loop,
        in chains, as engines draft."""
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
        prompts = self.prompts()
        tally = Tally(len(prompts))
        for step in evaluate(target, opened, prompts, protocol).steps:
            tally.add(step)
        each = map(tally.row, range(len(prompts)))
        return np.array([[counts.drafted.sum(), counts.accepted.sum()] for counts in each])

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
