"""What a stage is: its config, what it checks and plans, and what it does.

Each is one file in `train/stages` with one registration here.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from accelerate import Accelerator

from decode.registry import Registry
from decode.target.loading import Target
from train.console import Reporter
from train.data.read import Example
from train.schema import StageConfig


@dataclass
class Plan:
    """What a stage is going to do; sizes are estimates."""

    what: str
    trained_parameters: int = 0
    tokens: int = 0
    memory_bytes: int = 0


@dataclass
class StageContext:
    """What a stage is given to work with.

    directory: its own. outcomes: earlier stages' directories by name. examples: by split.
    system: the system message put before every conversation. run_name: for provenance.
    plans: while planning, those of earlier stages by name. allow_changes: go on from what other
    settings or another number of ranks began.
    """

    target: Target
    accelerator: Accelerator
    reporter: Reporter
    directory: Path
    outcomes: dict[str, Path]
    examples: dict[str, list[Example]]
    system: str | None
    run_name: str
    plans: dict[str, Plan] = field(default_factory=dict)
    allow_changes: bool = False


@dataclass
class Outcome:
    """What a stage made. drafter: the directory of the drafter it trained, which is then judged.
    target: the directory of the new target that it is for, where the run's own was trained too."""

    drafter: Path | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    target: Path | None = None


@dataclass(frozen=True)
class StagePlot:
    """A plot on the report's page. name: one that no other plot there has. svg: "" where there is
    nothing to show."""

    name: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Shown:
    """A stage's part of the report.

    figures: by name, texts and JSON values; of the latter the end of the name says how they are
    written: `_share` in per cents, `seconds` as a time, `_bytes` as a size. plots: from top to
    bottom.
    """

    figures: dict[str, Any]
    plots: list[StagePlot] = field(default_factory=list)


class Stage(ABC):
    """One kind of stage with its settings.

    `run` writes into `context.directory` only, each thing whole or not at all, and goes on where a
    killed run of it stopped.
    """

    Config: ClassVar[type[StageConfig]]

    def __init__(self, config: Any) -> None:
        self.config = config

    def check(self, earlier: Sequence[StageConfig]) -> None:
        """Raise UserError for settings that do not fit together, before any model is loaded."""
        return None

    @abstractmethod
    def plan(self, context: StageContext) -> Plan:
        """What `run` will do. The target is loaded; nothing is written.

        Every stage of a run is planned before the first one begins. Raise UserError here for
        whatever would end `run`, as far as it can be known.
        """

    @abstractmethod
    def run(self, context: StageContext) -> Outcome:
        """Do it."""

    @classmethod
    def show(cls, summary: dict[str, Any], number: int) -> Shown:
        """What the report shows of a stage of this kind, from the summary that `run` returned;
        number: the stage's in its run, for the names of plots."""
        return Shown(summary)


STAGES: Registry[type[Stage]] = Registry("stage kind")
