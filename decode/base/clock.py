"""The times of the parts of a step, on a CPU and on an accelerator."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class _Span(NamedTuple):
    """A part of a step between two events of a CUDA device."""

    part: str
    begin: Any
    end: Any
    seconds: Any  # of the pass


class Clock:
    """Adds the time since the last mark to a part of the step. It never makes the host wait for
    the device, unless it is asked for times at once.

    On a CUDA device, the time of a part is the time between two events on the device's stream. They
    are read after the device has passed them.

    device: where the step's work runs. timing: has the seconds of each part by its name, and gets
    the sums. On a CUDA device they lack the last parts until `finish`.
    """

    def __init__(self, device: torch.device, timing: Any) -> None:
        self.timing = timing
        self._device, self._cuda = device, device.type == "cuda"
        self._spans: deque[_Span] = deque()
        self._seconds: Any = None
        self._now: Callable[[], Any] = self._event if self._cuda else time.perf_counter
        self._last = self._now()

    def resume(self, seconds: Any = None) -> None:
        """A step begins. The time since the last mark is not counted. seconds: an object that gets
        the seconds of the parts that it has attributes for, until `end_pass`."""
        while self._spans and self._spans[0].end.query():
            self._add(self._spans.popleft())
        self._seconds, self._last = seconds, self._now()

    def mark(self, part: str) -> None:
        """The time since the last mark was spent on `part`."""
        begin, self._last = self._last, self._now()
        if self._cuda:
            self._spans.append(_Span(part, begin, self._last, self._seconds))
        else:
            self._add_seconds(part, self._last - begin, self._seconds)

    def move(self, seconds: float, part: str, to: str) -> None:
        """Count seconds of the host for another part than the one that they are counted for."""
        self._add_seconds(part, -seconds, self._seconds)
        self._add_seconds(to, seconds, self._seconds)

    def end_pass(self, *, at_once: bool) -> None:
        """The parts marked from now on belong to no pass. at_once: wait for the times of the pass,
        if needed. Else a CUDA device sets them later, at the latest in `finish`."""
        self._seconds = None
        if at_once or not self._cuda:
            self.finish()

    def finish(self) -> None:
        """Add the times of all marks so far. Waits for a CUDA device."""
        if self._spans:
            self._spans[-1].end.synchronize()
        while self._spans:
            self._add(self._spans.popleft())

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))  # which GPU is current is no matter
        return event

    def _add(self, span: _Span) -> None:
        self._add_seconds(span.part, span.begin.elapsed_time(span.end) / 1000, span.seconds)

    def _add_seconds(self, part: str, seconds: float, of_pass: Any) -> None:
        for sums in (self.timing, of_pass):
            if sums is not None and part in sums.__dict__:
                sums.__dict__[part] += seconds
