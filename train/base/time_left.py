"""What is left of a run: the plan of its parts, corrected by the time that parts really took."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

CUT = 0.98  # of its time: a part that takes more is ended by its limit
EVALUATING = "evaluation"  # the kind of the parts that are no stages


@dataclass(frozen=True)
class RunPart:
    """A part of a run by its plan. kind: of the stage, or EVALUATING. flops: those of its products;
    0 for a part that takes no time to speak of. max_seconds: the limit of its time, if it has one.
    """

    kind: str
    name: str
    flops: float
    max_seconds: float = math.inf


class TimeLeft:
    """The seconds that are left of a run.

    A part is as fast as the parts of its kind that ran, in seconds for each planned FLOP: a plan
    that counts too many tokens does so for all of them. If none of its kind ran, it is as fast as
    the stages that did. Evaluations say nothing about stages: they decode one text at a time.
    """

    def __init__(
        self, parts: Iterable[RunPart], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._waiting = {(part.kind, part.name): part for part in parts}
        self._measured: dict[tuple[str, str], tuple[float, float]] = {}  # seconds, planned FLOPs
        self._running: RunPart | None = None
        self._begun, self._share = 0.0, 1.0

    def begin(self, kind: str, name: str) -> None:
        """This part runs from now on, and the one before has ended."""
        now = self._clock()
        if self._running is not None:
            self._measure(self._running, now - self._begun, self._share)
        self._running = self._waiting.pop((kind, name), None)
        self._begun, self._share = now, 1.0

    def skip(self, kind: str, name: str, seconds: float | None) -> None:
        """An earlier start did this part, in these seconds; None: not known."""
        part = self._waiting.pop((kind, name), None)
        if part is not None and seconds is not None:
            self._measure(part, seconds, 1.0)

    def seconds(self, left: float | None = None, share: float = 1.0) -> float | None:
        """The seconds that are left of the run; None: not known yet.

        left: those of the running part, if its progress says them. share: of the part, that this
        start does.
        """
        part, gone = self._running, self._clock() - self._begun
        if part is None:
            return None
        if left is not None:
            left = max(0.0, min(left, part.max_seconds - gone))
            self._share = share
            self._measure(part, gone + left, share)
        elif (planned := self._estimate(part)) is not None:
            left = max(0.0, planned - gone)
        times = [left, *map(self._estimate, self._waiting.values())]
        known = [seconds for seconds in times if seconds is not None]
        return sum(known) if len(known) == len(times) else None

    def _measure(self, part: RunPart, seconds: float, share: float) -> None:
        if seconds > CUT * part.max_seconds:
            return  # how much of its work it does is not known
        self._measured[part.kind, part.name] = seconds, share * part.flops

    def _estimate(self, part: RunPart) -> float | None:
        if not part.flops:
            return 0.0
        same = [took for (kind, _), took in self._measured.items() if kind == part.kind]
        stages = [took for (kind, _), took in self._measured.items() if kind != EVALUATING]
        for measured in (same, stages):
            if flops := sum(count for _, count in measured):
                seconds = part.flops * sum(taken for taken, _ in measured) / flops
                return min(seconds, part.max_seconds)
        return None
