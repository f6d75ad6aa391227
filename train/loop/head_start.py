"""What a heads stage may continue to train: an earlier stage's heads, or a drafter directory's."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decode.base.errors import UserError
from decode.opening.adapters import KIND as ADAPTER
from decode.opening.directory import describe_drafter
from decode.opening.shipped import shipped_drafter
from distill.students import refuse
from heads.heads_directory import stored_options
from heads.kinds import HEADS
from heads.options import HeadOptions
from train.base.drafter_stages import require_whole
from train.settings.schema import StageConfig, closest_stage


def start_directory(start: str) -> Path:
    """The directory of a drafter to continue: a path, or `embedded:NAME` of one that comes along.
    Raises UserError for an unknown NAME."""
    return shipped_drafter(start) or Path(start)


def check_start(config: Any, start: str, earlier: Sequence[StageConfig]) -> None:
    """Raise UserError unless a heads stage can continue to train `start`.

    config: the config of the stage, with its name, heads and draft_vocabulary. start: the name of
    an earlier heads stage, or a drafter as for `start_directory`.
    """
    refuse(config, draft_vocabulary=f"the heads of {start} keep their draft vocabulary")
    directory = start_directory(start)
    if directory.is_dir() and start not in {stage.name for stage in earlier}:
        _check_same_heads(config, start, _heads_in(config, directory))
        return
    if len(Path(start).parts) > 1:  # stages have no such names
        raise UserError(
            f"stage {config.name}: start is {start}, which is not a directory; expected the "
            "directory of a drafter (draftsmith import writes one), the name of an earlier heads "
            "stage, or null for new heads"
        )
    first: Any = closest_stage(start, earlier, "heads")
    require_whole(config.name, start, earlier)
    if first.backbone is not None:
        raise UserError(
            f"stage {config.name} starts from the heads of {start}, but {start} also trained the "
            "target, and its heads belong to that new target; name a stage that does not train "
            "the target, or start a run with the new target"
        )
    _check_same_heads(config, start, first.heads)


def _heads_in(config: Any, directory: Path) -> HeadOptions:
    """Return the options of the heads in a drafter directory."""
    kind = describe_drafter(directory)["kind"]
    if kind == ADAPTER:
        raise UserError(
            f"stage {config.name} cannot continue {directory}, which is an adapter on another "
            "drafter; start from that drafter"
        )
    if kind not in HEADS:
        raise UserError(
            f"stage {config.name} trains heads, but {directory} is a {kind} drafter; start a "
            "distill stage from it (drafter: {model: DIRECTORY})"
        )
    return stored_options(directory)


def _check_same_heads(config: Any, start: str, heads: HeadOptions) -> None:
    if heads != config.heads:
        settings = {"type": heads.type} | heads.model_dump(exclude_defaults=True)
        raise UserError(
            f"stage {config.name} continues to train the heads of {start}. Their settings are "
            f"{heads}, but this stage has {config.heads}; set the same type and options, heads: "
            f"{json.dumps(settings)}"
        )
