"""Training checkpoints: accelerate's state, in directories that are either complete or absent.

accelerate writes in place, deletes the old checkpoint before the new one exists, loads the last
folder even if it is incomplete, and continues silently if it cannot read the random state. Here a
checkpoint is written under another name and then renamed. It stores hashes, the number of ranks and
the engine.

The batches, the learning rate and the loss do not depend on the number of ranks, so it may change
where the stored weights do not depend on it either: under DDP, whose ranks have all of them, and
under FSDP2, whose shards torch.distributed.checkpoint deals out anew.
"""

import hashlib
import json
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, broadcast_object_list

from decode.base.artifact import (
    manifest_sha256,
    newest_complete,
    numbers_of,
    recover,
    remove_directory,
    require_space,
    verify_directory,
    write_directory,
)
from decode.base.errors import UserError
from train.base.console import Reporter
from train.measure.ranks import Ranks

PREFIX = "step"
STATE = "trainer.json"
DAMAGED = "damaged"
# Engines whose checkpoints have all weights in one file.
UNSHARDED = {"NO", "MULTI_GPU", "MULTI_CPU"}
# Where accelerate puts AdamW's moments under FSDP2 if the ranks write their shards.
RESHARDED = "optimizer_0"

Extra = Callable[[Path], None]


class Checkpoints:
    """The checkpoints of one training in `parent`. keep: the number of the newest that are kept.

    trained: the trained parameters by group (`train.loop.optimizer.grouped_names`). allow_changes:
    continue from a checkpoint made by another number of ranks, under DDP and FSDP2.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        parent: Path,
        reporter: Reporter,
        *,
        keep: int,
        trained: Sequence[Sequence[str]],
        allow_changes: bool = False,
    ) -> None:
        self._trained = hashlib.sha256(json.dumps(trained).encode()).hexdigest()
        self.accelerator, self.parent, self.reporter = accelerator, parent, reporter
        self.keep, self.allow_changes = keep, allow_changes

    def save(self, step: int, progress: dict[str, Any], extra: Extra) -> None:
        """Save the model, the optimizer and the random state of all ranks, and `progress`.

        Every rank must call this. extra(directory) writes a rank's other data to files of that
        rank. Older checkpoints are deleted only after the new one is in place.
        """

        def fill(directory: Path) -> None:
            self._save_into(directory, extra)
            state = {
                "made_with": self._made_with(),
                "trained": self._trained,
                "progress": progress,
            }
            (directory / STATE).write_text(json.dumps(state), encoding="utf-8")

        if self.accelerator.is_main_process:
            write_directory(self.parent / f"{PREFIX}-{step}", fill, meta={"step": step})
            for old in numbers_of(self.parent, PREFIX)[: -self.keep]:
                remove_directory(self.parent / f"{PREFIX}-{old}")
        else:
            self._save_into(None, extra)
        self.accelerator.wait_for_everyone()

    def load(self, extra: Extra) -> dict[str, Any] | None:
        """Load the newest complete checkpoint, extra(directory) included, and return its
        `progress`, or None if there is no checkpoint yet.

        The first rank chooses it for all: ranks that see different files must not train different
        weights. Damaged checkpoints are reported and renamed. Raises UserError on all ranks if all
        checkpoints are damaged, if a rank cannot read the chosen one or reads another, or if it was
        made by another engine or number of ranks, or for other weights.
        """
        ranks = Ranks.of(self.accelerator)
        chosen = ranks.main_only(self._choose)
        if chosen is None:
            return None
        newest, sha256 = chosen
        # The first rank has just hashed these files.
        ranks.together(lambda: None if ranks.is_main else _require_sound(newest, sha256))
        state = json.loads((newest / STATE).read_text(encoding="utf-8"))
        # load_state sets the counter from the random state's file, and hides a failure to read it.
        self.accelerator.step = -1
        self.accelerator.load_state(str(newest))
        if state["made_with"] != self._made_with():
            self._share_random_state()
        else:
            ranks.together(lambda: self._require_random_state(newest))
        extra(newest)
        return state["progress"]

    def _choose(self) -> tuple[Path, str] | None:
        """The newest complete checkpoint and the hash of its manifest; None: there is none yet."""
        recover(self.parent, alone=True)
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
        state = json.loads((newest / STATE).read_text(encoding="utf-8"))
        self._require_same(state["made_with"], newest)
        # AdamW's moments have numbers, not names. Checkpoints of earlier versions do not say more.
        if state.get("trained", self._trained) != self._trained:
            raise UserError(
                f"{newest} is of a training of other weights, or with other groups of them: a "
                "setting that adds or resizes weights, or a pattern of optimizer.groups, changed. "
                "Set it as it was, or delete the directory of these checkpoints to train this "
                "stage from the beginning."
            )
        for error in damaged:
            _put_aside(error.directory)
        return newest, manifest_sha256(newest)

    def _require_random_state(self, checkpoint: Path) -> None:
        if self.accelerator.step < 0:
            raise UserError(
                f"{checkpoint}: the random state of rank {self.accelerator.process_index} cannot "
                "be read, so training would continue with other random numbers. Use the versions "
                "of torch, numpy and accelerate that wrote it, or delete this checkpoint."
            )

    def require_space(self, module: Any, optimizer: Any, *, average: bool, best: bool) -> None:
        """Raise UserError if the disk lacks space for the kept checkpoints, one more while it is
        written, and the drafter. average, best: the EMA, or the best version, is kept too."""
        weights = sum(p.nbytes for p in module.parameters())
        trained = sum(p.nbytes for group in optimizer.param_groups for p in group["params"])
        moments = 3 if average else 2  # AdamW's two, and the EMA
        missing = max(self.keep + 1 - len(numbers_of(self.parent, PREFIX)), 1)
        needed = missing * (weights + moments * trained) + weights
        if best:
            needed += (self.keep + 2) * trained
        require_space(self.parent, needed, "this stage's checkpoints and its drafter")

    def stored(self) -> Iterator[dict[str, Any]]:
        """The `progress` of each checkpoint. Damaged ones are left out."""
        for step in numbers_of(self.parent, PREFIX):
            with suppress(OSError, ValueError, KeyError):
                yield json.loads(
                    (self.parent / f"{PREFIX}-{step}" / STATE).read_text(encoding="utf-8")
                )["progress"]

    def _made_with(self) -> dict[str, Any]:
        made = {
            "ranks": self.accelerator.num_processes,
            "engine": self.accelerator.distributed_type.value,
        }
        dynamo = self.accelerator.state.dynamo_plugin
        if made["engine"] in UNSHARDED and dynamo.backend != DynamoBackend.NO:
            # accelerate then stores the weights under other names.
            made["compiled"] = "regions" if dynamo.use_regional_compilation else "whole"
        return made

    def _require_same(self, before: dict[str, Any], path: Path) -> None:
        now = self._made_with()
        if before == now:
            return
        if before.get("compiled") != now.get("compiled"):
            words = {None: "no dynamo_backend", "whole": "dynamo_backend"}
            words["regions"] = "dynamo_backend and use_regional_compilation"
            one, two = (words[x.get("compiled")] for x in (before, now))
            raise UserError(
                f"{path} was made with {one}, and now there is {two}: its weights have other "
                "names. Launch with the settings of accelerate that it was made with"
            )
        described = [f"{x['ranks']} ranks under {x['engine']}" for x in (before, now)]
        engines = {before["engine"], now["engine"]}
        if engines <= UNSHARDED or (engines == {"FSDP"} and (path / RESHARDED).is_dir()):
            advice = None
        elif engines == {"FSDP"}:
            advice = (
                "set fsdp_state_dict_type to SHARDED_STATE_DICT in the accelerate config, whose "
                "checkpoints any number of ranks can read"
            )
        else:
            advice = (
                "a checkpoint of DDP or FSDP2 can be continued by another number of ranks of that "
                "engine, and one of DeepSpeed by the same number only"
            )
        if advice is not None:
            raise UserError(
                f"{path} was made by {described[0]}, and {described[1]} cannot read its shards. "
                f"Launch {described[0]} again; {advice}"
            )
        if not self.allow_changes:
            raise UserError(
                f"{path} was made by {described[0]}, not {described[1]}. The batches would be the "
                "same, but dropout would have other random numbers. Launch the same engine and "
                "number of ranks, or accept the change with --allow-changes."
            )
        self.reporter.say(
            f"  continuing from a checkpoint of {described[0]} with {described[1]}: the batches "
            "are the same; all ranks take the first one's random state"
        )

    def _share_random_state(self) -> None:
        """Give all ranks the random state of the first one, which it has read from its file. What
        all ranks must draw alike, such as the head of a minibatch, then stays alike."""
        on_gpu = self.accelerator.device.type == "cuda"
        states: list[Any] = [random.getstate(), np.random.get_state(), torch.get_rng_state()]
        states.append(torch.cuda.get_rng_state() if on_gpu else None)
        broadcast_object_list(states)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if on_gpu:
            torch.cuda.set_rng_state(states[3])

    def _save_into(self, directory: Path | None, extra: Extra) -> None:
        # Sharded engines write from every rank, so every rank needs the main process's directory.
        path = [str(directory)]
        broadcast_object_list(path)
        self.accelerator.save_state(path[0])
        extra(Path(path[0]))
        self.accelerator.wait_for_everyone()


def _require_sound(checkpoint: Path, sha256: str) -> None:
    """Raise UserError if this rank does not read the files that the first rank chose."""
    verify_directory(checkpoint)
    if manifest_sha256(checkpoint) != sha256:
        raise UserError(
            f"{checkpoint} has other files here than for the first rank; expected a disk that all "
            "ranks share. Start again when this machine sees the files of the others."
        )


def _put_aside(directory: Path) -> None:
    """Rename a damaged checkpoint, so that training can write this step again."""
    aside = directory.with_name(f"{DAMAGED}-{directory.name}")
    if aside.exists():
        remove_directory(aside)
    directory.rename(aside)


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
