"""Hidden states of answers, in files that vLLM writes in the answers' own requests.

A file has the tokens that vLLM read: those of the prompt and of the answer, and maybe some behind
the answer's end.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from decode.model.loading import Target
from train.engines.states.ask_states import LOCK, StatesReader, Unusable, delete, is_written
from train.engines.states.open_states import vllm_options
from train.engines.states.served_states import EngineLayers

# A step of vLLM in which one text ends at most 2 tokens before the engine's limit stores the states
# of no text, without a word. The steps that it plans ahead count too.
SPARE_TOKENS = 8


class AnswerStates:
    """The states of answers, until each is taken once.

    layers: the captured ones. files: the directory that vLLM writes to. longest: the most tokens of
    a file. seconds: the longest wait for a file.
    """

    def __init__(
        self, target: Target, layers: Sequence[int], files: Path, longest: int, seconds: float
    ) -> None:
        self._layers, self._device = EngineLayers(target, layers), target.device
        self._reader = StatesReader(self._layers)
        self._files, self._longest, self._seconds = files, longest, seconds

    @property
    def options(self) -> dict[str, Any]:
        """Those of the engine."""
        return vllm_options(self._layers.ids, self._files)

    def take(self, request: str) -> tuple[list[int], dict[int, Tensor]] | None:
        """The tokens of the newest file of a request, and their states: [n, H] by captured layer,
        on the CPU. None: it has no usable file. All its files are deleted. Raises UserError for
        states of another kind, and for a full disk."""
        found = None
        locks = self._files.glob(f"*-{request}-*{LOCK}")
        for lock in sorted(locks, key=lambda lock: lock.stat().st_mtime):
            path = lock.with_name(lock.name.removesuffix(LOCK))
            end = time.monotonic() + self._seconds
            while is_written(path) is False and time.monotonic() < end:
                time.sleep(0.001)
            try:
                tokens, states = self._reader.load(path, self._longest)
                joined = self._layers.joined([states], self._device)
                found = tokens, {layer: x[0].cpu() for layer, x in joined.items()}
            except Unusable:
                found = None
            finally:
                delete(path)
        return found
