"""Reads the next batches of a cache in a thread, while the current batch is trained on."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

# Batches that are read before their use.
READ_AHEAD = 4


class ReadAhead:
    """Batches of a cache, by the ids of their samples.

    read(ids): the tensors of a batch, on the CPU. At most the batches of the last `expect` are in
    memory. With CUDA they are in pinned memory, so the copy to the device does not wait. threaded:
    read in a thread: with CUDA only. A training on a CPU would slow down by half, because the
    thread keeps OpenMP threads (`decode.base.threads`); there, a batch is read when it is taken.
    """

    def __init__(self, read: Callable[[Sequence[str]], Mapping[Any, Tensor]]) -> None:
        self._read = read
        self._pins = self.threaded = torch.cuda.is_available()
        self._reading: dict[tuple[str, ...], Future[Mapping[Any, Tensor]]] = {}
        self._thread: ThreadPoolExecutor | None = None

    def expect(self, batches: Sequence[Sequence[str]]) -> None:
        """Begin to read these batches, in this order. All others are dropped."""
        if not self.threaded:
            return
        wanted = [tuple(ids) for ids in batches if ids]
        for key in self._reading.keys() - set(wanted):
            self._reading.pop(key).cancel()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "read-ahead")
        for key in wanted:
            if key not in self._reading:
                self._reading[key] = self._thread.submit(self._loaded, key)

    def take(self, ids: Sequence[str], device: torch.device) -> dict[Any, Tensor]:
        """A batch on a device. Waits for it, or reads it now if it was not expected. Raises as
        `read` does."""
        future = self._reading.pop(tuple(ids), None)
        batch = self._loaded(ids) if future is None else future.result()
        return {name: x.to(device, non_blocking=self._pins) for name, x in batch.items()}

    def _loaded(self, ids: Sequence[str]) -> Mapping[Any, Tensor]:
        batch = self._read(ids)
        return {name: x.pin_memory() for name, x in batch.items()} if self._pins else batch
