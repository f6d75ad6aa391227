"""The time by activity, and the peak memory, of this process."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch


class Clock:
    """Seconds by activity. An activity inside another is not counted twice.

    A GPU works asynchronously, so a clock must wait for it to measure anything. Waiting slows down
    training, so only every n-th step is measured, and it counts n times.

    weight: how many times the current work counts. 0: no measuring and no waiting.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self.weight = 1.0
        self._device = device
        self._running: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, activity: str) -> Iterator[None]:
        """The time inside this context counts as `activity`."""
        self._turn()
        self._running.append(activity)
        try:
            yield
        finally:
            self._turn()
            self._running.pop()

    def _turn(self) -> None:
        if self.weight and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if self._running and self.weight:
            activity = self._running[-1]
            elapsed = self.weight * (now - self._since)
            self.seconds[activity] = self.seconds.get(activity, 0.0) + elapsed
        self._since = now

    def shares(self) -> dict[str, float]:
        """Each activity's share of the measured time. The shares add up to 1."""
        total = sum(self.seconds.values())
        return {name: seconds / total for name, seconds in self.seconds.items()} if total else {}


def peak_memory() -> int:
    """The most bytes that this process has used so far (on CUDA: on the device)."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows
        return psutil.Process().memory_info().rss
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
