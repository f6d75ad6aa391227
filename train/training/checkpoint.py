"""Training checkpoints: accelerate's state, in directories that are either complete or absent.

accelerate writes in place, deletes the old checkpoint before the new one exists, loads the last
folder even if it is incomplete, and continues silently if it cannot read the random state. Here a
checkpoint is written under another name and then renamed. It stores hashes, the number of ranks and
the engine.
"""

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from decode.artifact import newest_complete, recover, remove_directory, write_directory
from decode.errors import UserError
from train.console import Reporter

PREFIX = "step"
# Two: if the newest is damaged, one is left.
KEEP = 2
STATE = "trainer.json"

Extra = Callable[[Path], None]


class Checkpoints:
    """The checkpoints of one training in `parent`.

    allow_changes: continue from a checkpoint made by another number of ranks, if the engine keeps
    the complete weights on every rank.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        parent: Path,
        reporter: Reporter,
        *,
        allow_changes: bool = False,
    ) -> None:
        self.accelerator, self.parent, self.reporter = accelerator, parent, reporter
        self.allow_changes = allow_changes

    def save(self, step: int, progress: dict[str, Any], extra: Extra) -> None:
        """Save the model, the optimizer and the random state of all ranks, and `progress`.

        Every rank must call this. extra(directory) writes a rank's other data to files of that
        rank. Older checkpoints are deleted only after the new one is in place.
        """

        def fill(directory: Path) -> None:
            self._save_into(directory, extra)
            state = {"made_with": self._made_with(), "progress": progress}
            (directory / STATE).write_text(json.dumps(state))

        if self.accelerator.is_main_process:
            write_directory(self.parent / f"{PREFIX}-{step}", fill, meta={"step": step})
            for old in sorted(self._steps())[:-KEEP]:
                remove_directory(self.parent / f"{PREFIX}-{old}")
        else:
            self._save_into(None, extra)
        self.accelerator.wait_for_everyone()

    def load(self, extra: Extra) -> dict[str, Any] | None:
        """Load the newest complete checkpoint, extra(directory) included, and return its
        `progress`, or None if there is no checkpoint yet.

        Damaged checkpoints are reported and skipped. Raises UserError if all are damaged, or if the
        checkpoint was made by another engine or number of ranks.
        """
        if self.accelerator.is_main_process:
            recover(self.parent)
        self.accelerator.wait_for_everyone()
        newest, damaged = newest_complete(self.parent, PREFIX)
        for error in damaged:
            self.reporter.say(f"  skipping a damaged checkpoint: {error}")
        if newest is None:
            if damaged:
                raise UserError(
                    f"no checkpoint in {self.parent} is complete; delete that directory to train "
                    "this stage from the beginning"
                )
            return None
        state = json.loads((newest / STATE).read_text())
        self._require_same(state["made_with"], newest)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            for error in damaged:
                remove_directory(error.directory)
        # load_state sets the counter from the random state's file, and hides a failure to read it.
        self.accelerator.step = -1
        self.accelerator.load_state(str(newest))
        if self.accelerator.step < 0 and state["made_with"] == self._made_with():
            raise UserError(
                f"{newest}: the random state of rank {self.accelerator.process_index} cannot be "
                "read, so training would continue with other random numbers. Use the versions of "
                "torch, numpy and accelerate that wrote it, or delete this checkpoint."
            )
        extra(newest)
        progress: dict[str, Any] = state["progress"]
        return progress

    def count(self) -> int:
        """The number of checkpoints."""
        return len(self._steps())

    def _made_with(self) -> dict[str, Any]:
        return {
            "ranks": self.accelerator.num_processes,
            "engine": self.accelerator.distributed_type.value,
        }

    def _require_same(self, before: dict[str, Any], path: Path) -> None:
        now = self._made_with()
        if before == now:
            return
        described = [f"{x['ranks']} ranks under {x['engine']}" for x in (before, now)]
        unsharded = {"NO", "MULTI_GPU", "MULTI_CPU"}
        if not {before["engine"], now["engine"]} <= unsharded:
            raise UserError(
                f"{path} was made by {described[0]}, and {described[1]} cannot read its shards; "
                "launch the same engine and number of ranks"
            )
        if not self.allow_changes:
            raise UserError(
                f"{path} was made by {described[0]}, not {described[1]}. The batches would be the "
                "same, but dropout would have other random numbers. Launch the same engine and "
                "number of ranks, or accept the change with --allow-changes."
            )
        self.reporter.say(
            f"  continuing from a checkpoint of {described[0]} with {described[1]}: ranks without "
            "a stored random state start with a new one"
        )

    def _save_into(self, directory: Path | None, extra: Extra) -> None:
        # Sharded engines write from every rank, so every rank needs the main process's directory.
        path = [str(directory)]
        broadcast_object_list(path)
        self.accelerator.save_state(path[0])
        extra(Path(path[0]))
        self.accelerator.wait_for_everyone()

    def _steps(self) -> list[int]:
        names = (path.name.removeprefix(f"{PREFIX}-") for path in self.parent.glob(f"{PREFIX}-*"))
        return [int(name) for name in names if name.isdigit()]


class Stopped(Exception):
    """Training stopped after a checkpoint because a signal asked for it."""


class StopRequest:
    """Records whether this process received SIGTERM or SIGINT. A second SIGINT interrupts at
    once."""

    def __init__(self) -> None:
        self.received = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside this context the two signals only set `received`. Outside the main thread signals
        cannot be handled, so nothing changes there."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

        def note(number: int, _: FrameType | None) -> Any:
            if self.received and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.received = True

        try:
            for number in before:
                signal.signal(number, note)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
