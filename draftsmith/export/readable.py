"""Whether the engine that a run names can read the drafters that its stages will train.

The layouts judge a drafter that does not exist yet by the settings of its stage, with the checks
that an export does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from decode.base.errors import UserError
from decode.model.without_weights import load_model_config
from decode.opening.directory import DRAFTER_FILE
from draftsmith.export.formats import ExportJob, format_for, require_options
from draftsmith.export.formats.readers import outdated
from draftsmith.export.trained_drafter import TrainedDrafter
from train.run.config import RunConfig
from train.settings.drafter_stages import drafts_in_parallel, has_other_tokenizer, heads_stage
from train.settings.schema import StageConfig

KINDS = ("heads", "distill", "online", "layer_skip")  # of stages that train a drafter


@dataclass(frozen=True)
class PlannedDrafter(TrainedDrafter):
    """The drafter of a stage that did not run yet. path: the name of the stage. stages: that stage
    and those before it. target_name: the run's target."""

    stages: Sequence[StageConfig]
    target_name: str

    def __str__(self) -> str:
        return f"the drafter of stage {self.path}"

    @property
    def stage(self) -> Any:
        return self.stages[-1]

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config of a small LM: that of the model that it starts from."""
        stage = self.stage
        while stage.drafter.stage is not None:
            stage = next(other for other in self.stages if other.name == stage.drafter.stage)
        settings: dict[str, Any] = load_model_config(stage.drafter.model or self.target_name)[
            0
        ].to_dict()
        return settings | (stage.drafter.config or {})

    @cached_property
    def options(self) -> Any:
        return getattr(heads_stage(self.stage.name, self.stages), "heads", None)

    @property
    def is_reduced(self) -> bool:
        return _is_reduced(self.stage.name, self.stages)


def require_readable(config: RunConfig) -> None:
    """Raise UserError for a stage whose drafter the run's `engine` could not read."""
    if config.engine is None:
        return
    for number, stage in enumerate(config.stages):
        if stage.kind not in KINDS:
            continue
        stages = config.stages[: number + 1]
        description = {"kind": _kind(stage, stages)}
        drafter = PlannedDrafter(Path(stage.name), description, stages, config.target.model)
        try:
            _require(config.engine, drafter)
        except UserError as error:
            raise UserError(f"stage {stage.name}, for engine {config.engine}: {error}") from error


def _require(engine: str, drafter: PlannedDrafter) -> None:
    layout = format_for(engine, drafter.kind)
    reason = outdated(layout.name, engine)
    if reason is not None:
        raise UserError(
            f"{reason}; train eagle3 heads, or leave engine out if yours is an older one"
        )
    if drafter.is_reduced and not layout.carries_vocabulary:
        raise UserError(
            f"{drafter} has a reduced draft vocabulary, which no reader of layout {layout.name} "
            "supports: its output layer would be filled up with rows that were not trained. Leave "
            "draft_vocabulary out"
        )
    require_options(engine, layout, drafter)
    layout.refuse(ExportJob(drafter, None, drafter.target_name, None, gamma=1))


def _kind(stage: Any, stages: Sequence[StageConfig]) -> str:
    """The kind of a stage's drafter, as in a drafter's directory."""
    if stage.kind == "layer_skip":
        return "skip"
    heads: Any = heads_stage(stage.name, stages)
    if heads is not None:
        return str(heads.heads.type)
    if has_other_tokenizer(stage.name, stages):
        return "shared_vocabulary"
    return "pard" if drafts_in_parallel(stage.name, stages) else "small_lm"


def _is_reduced(name: str, stages: Sequence[StageConfig]) -> bool:
    """Whether the drafter or the cache of stage `name` has a reduced vocabulary, its own or that
    of what it continues. name: also the directory of a drafter."""
    stage: Any = next((stage for stage in stages if stage.name == name), None)
    if stage is None:
        path = Path(name)
        return (path / DRAFTER_FILE).exists() and TrainedDrafter.open(path).is_reduced
    if getattr(stage, "draft_vocabulary", None) is not None:
        return True
    start = getattr(stage, "start", None) or getattr(stage, "teacher", None)
    drafter = getattr(stage, "drafter", None)
    names = (start, getattr(drafter, "stage", None))
    return any(_is_reduced(name, stages) for name in names if name)
