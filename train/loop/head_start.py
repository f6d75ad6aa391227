"""The drafter directory whose heads a heads stage continues to train."""

from pathlib import Path

from decode.base.errors import UserError
from decode.opening.adapters import KIND as ADAPTER
from decode.opening.directory import describe_drafter
from decode.opening.shipped import shipped_drafter
from heads.heads_directory import stored_options
from heads.kinds import HEADS
from train.settings.heads_config import HeadsConfig


def start_directory(start: str) -> Path:
    """The directory of a drafter to continue: a path, or `embedded:NAME` of one that comes along.
    Raises UserError for an unknown NAME."""
    return shipped_drafter(start) or Path(start)


def check_start_directory(config: HeadsConfig, start: str) -> None:
    """Raise UserError unless a heads stage can continue to train the drafter of a directory, named
    as for `start_directory`."""
    directory = start_directory(start)
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
    config.require_same_heads(stored_options(directory))
