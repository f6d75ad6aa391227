"""Where a training's time goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Seconds by activity; an activity inside another is not counted twice.

    On a GPU work runs behind the program's back, so that only a clock which waits for it measures
    anything. To slow down a few steps only, every n-th is measured, and counts n times.

    weight: how often what is being done counts; 0: it is not measured, nor waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self.weight = 1.0
        self._device = device
        self._running: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, activity: str) -> Iterator[None]:
        """Time spent inside counts as `activity`."""
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
        """Each activity's share of the time measured; they add up to 1."""
        total = sum(self.seconds.values())
        return {name: seconds / total for name, seconds in self.seconds.items()} if total else {}
