"""Training checkpoints: accelerate's own state, in directories that are whole or absent."""

import json
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from decode.artifact import newest_complete, recover, remove_directory, write_directory
from decode.errors import UserError
from train.console import Reporter

PREFIX = "step"
# Two, so that one is left when the newest turns out to be damaged.
KEEP = 2


def save_checkpoint(
    accelerator: Accelerator, parent: Path, step: int, state: dict[str, Any]
) -> None:
    """Save model, optimizer and random state of all ranks, with `state` beside them.

    Every rank must call it. Older checkpoints go only after the new one is in place.
    """

    def fill(directory: Path) -> None:
        _save_into(accelerator, directory)
        (directory / "trainer.json").write_text(json.dumps(state))

    if accelerator.is_main_process:
        write_directory(parent / f"{PREFIX}-{step}", fill, meta={"step": step})
        for old in sorted(_steps(parent))[:-KEEP]:
            remove_directory(parent / f"{PREFIX}-{old}")
    else:
        _save_into(accelerator, None)
    accelerator.wait_for_everyone()


def load_checkpoint(
    accelerator: Accelerator, parent: Path, reporter: Reporter
) -> dict[str, Any] | None:
    """Load the newest complete checkpoint and return its `state`; None when there is none yet.

    Damaged ones are named and passed over. Raises UserError when all that exist are damaged.
    """
    if accelerator.is_main_process:
        recover(parent)
    accelerator.wait_for_everyone()
    found, damaged = newest_complete(parent, PREFIX)
    for error in damaged:
        reporter.say(f"  passing over a checkpoint: {error}")
    if found is None:
        if damaged:
            raise UserError(
                f"no checkpoint in {parent} is complete; delete that directory to train this stage "
                "from its beginning"
            )
        return None
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        for error in damaged:
            remove_directory(error.directory)
    accelerator.load_state(str(found))
    state: dict[str, Any] = json.loads((found / "trainer.json").read_text())
    return state


def _save_into(accelerator: Accelerator, directory: Path | None) -> None:
    # Sharded engines write from every rank, so all must learn where the main process writes.
    where = [str(directory)]
    broadcast_object_list(where)
    accelerator.save_state(where[0])
    accelerator.wait_for_everyone()


def _steps(parent: Path) -> list[int]:
    names = (path.name.removeprefix(f"{PREFIX}-") for path in parent.glob(f"{PREFIX}-*"))
    return [int(name) for name in names if name.isdigit()]
