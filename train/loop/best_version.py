"""The best version of a drafter in training, by a figure on the dev slice."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.base.artifact import remove_directory, verify_directory, write_directory
from decode.base.errors import UserError
from train.loop.checkpoint import Checkpoints
from train.loop.training_task import TrainingProgress

PREFIX = "best"
FILE = "weights.safetensors"


class BestVersion:
    """The weights of the best version, in `best-STEP` beside the checkpoints.

    A checkpoint names the best version of its time. Such a version is kept as long as a checkpoint
    names it, so a training that goes on from any checkpoint finds the version that it had then.
    """

    def __init__(self, accelerator: Accelerator, checkpoints: Checkpoints) -> None:
        self.accelerator, self.checkpoints = accelerator, checkpoints

    def keep_if_better(
        self,
        progress: TrainingProgress,
        figure: str,
        figures: Mapping[str, float],
        weights: Callable[[], dict[str, Tensor]],
    ) -> None:
        """Store the version after this step, and note it in `progress`, if its figure is above that
        of the best version. Every rank must call this.

        weights: gathers the complete trained weights for the main process. Raises UserError if
        `figures` lacks the figure.
        """
        if figure not in figures:
            raise UserError(
                f"loop.keep_best: the dev slice gives no {figure}, because its texts are too short "
                "for a draft; use other dev text, or leave keep_best out"
            )
        before = -math.inf if progress.best is None else progress.best["value"]
        if not figures[figure] > before:
            return
        progress.best = {"step": progress.step, "figure": figure, "value": figures[figure]}
        gathered = weights()
        if self.accelerator.is_main_process:
            self._write(progress.step, gathered)
        self.accelerator.wait_for_everyone()

    def load(self, step: int, prefix: str) -> dict[str, Tensor]:
        """The weights after this step whose names begin with `prefix`, which is removed."""
        directory = self._directory(step)
        verify_directory(directory)
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in load_file(directory / FILE).items()
            if name.startswith(prefix)
        }

    def _write(self, step: int, weights: Mapping[str, Tensor]) -> None:
        def fill(directory: Path) -> None:
            tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
            save_file(tensors, directory / FILE)

        write_directory(self._directory(step), fill, meta={"step": step})
        named = [stored["best"] for stored in self.checkpoints.stored() if stored.get("best")]
        kept = {self._directory(number) for number in [step, *(best["step"] for best in named)]}
        for path in self.checkpoints.parent.glob(f"{PREFIX}-*"):
            if path not in kept:
                remove_directory(path)

    def _directory(self, step: int) -> Path:
        return self.checkpoints.parent / f"{PREFIX}-{step}"
