"""The base class of stages: a stage's config, checks, plan and run.

Each stage is one file in `train/stages` and registers itself in STAGES.
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
class StagePlan:
    """What a stage will do; sizes are estimates."""

    what: str
    trained_parameters: int = 0
    tokens: int = 0
    memory_bytes: int = 0


@dataclass
class StageContext:
    """The inputs of a stage.

    directory: this stage's directory. outcomes: earlier stages' directories by name. examples: by
    split. system: a system message for every conversation that has none. run_name: for provenance.
    plans: the plans of earlier stages by name, while planning. allow_changes: continue a run that
    began with other settings or another number of ranks.
    """

    target: Target
    accelerator: Accelerator
    reporter: Reporter
    directory: Path
    outcomes: dict[str, Path]
    examples: dict[str, list[Example]]
    system: str | None
    run_name: str
    plans: dict[str, StagePlan] = field(default_factory=dict)
    allow_changes: bool = False


@dataclass
class Outcome:
    """The results of a stage. drafter: the directory of the trained drafter, which is then
    evaluated. target: the directory of the drafter's new target, if the target was trained too."""

    drafter: Path | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    target: Path | None = None


@dataclass(frozen=True)
class StagePlot:
    """A plot on the report's page. name: unique on that page. svg: "" if there is nothing to
    plot."""

    name: str
    caption: str
    svg: str


@dataclass(frozen=True)
class ReportSection:
    """A stage's part of the report.

    figures: strings and JSON values by name. The end of the name sets the format of a JSON value:
    `_share` as a percentage, `seconds` as a time, `_bytes` as a size. plots: from top to bottom.
    """

    figures: dict[str, Any]
    plots: list[StagePlot] = field(default_factory=list)


class Stage(ABC):
    """One kind of stage with its settings.

    `run` writes only into `context.directory`. It writes each item completely or not at all, and
    continues where a killed run stopped.
    """

    Config: ClassVar[type[StageConfig]]

    def __init__(self, config: Any) -> None:
        self.config = config

    def check(self, earlier: Sequence[StageConfig]) -> None:
        """Raise UserError for settings that do not fit together. No model is loaded yet."""
        return None

    @abstractmethod
    def plan(self, context: StageContext) -> StagePlan:
        """What `run` will do. The target is loaded; nothing is written.

        Every stage of a run is planned before the first one begins. Raise UserError here for
        everything that would make `run` fail, as far as it can be known.
        """

    @abstractmethod
    def run(self, context: StageContext) -> Outcome:
        """Do the stage's work."""

    @classmethod
    def show(cls, summary: dict[str, Any], number: int) -> ReportSection:
        """The report's part for a stage of this kind. summary: returned by `run`. number: the
        stage's number in its run, for the names of plots."""
        return ReportSection(summary)


STAGES: Registry[type[Stage]] = Registry("stage kind")
