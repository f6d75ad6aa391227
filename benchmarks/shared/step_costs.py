"""What a decode step costs beside the functions in C++: calls of Python, and time outside of them.

Calls do not depend on the machine's speed, so they can be compared and asserted.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from types import FrameType
from typing import Any

from decode.loop.decoding import Decoding
from decode.model.forward import few_rows

# The first steps of a text build what the later ones use again.
WARM_UP = 3


@dataclass
class StepCost:
    """Medians over steps. calls: of the interpreter, those of functions in Python and of built-in
    ones, as `cProfile` counts them. seconds: of the whole step. outside: the seconds outside of the
    functions in C++."""

    calls: int
    seconds: float
    outside: float


def step_cost(decoding: Decoding, steps: int) -> StepCost:
    """Take `steps` steps of running rows to count calls, and as many to take times, after some that
    do not count. No row may end before that."""
    for _ in range(WARM_UP):
        decoding.step()
    counts = [_calls(decoding.step) for _ in range(steps)]
    whole, inside = [], []
    for _ in range(steps):
        with _timed_functions(decoding.decoder.lm.model.dtype) as seconds:
            begin = time.perf_counter()
            decoding.step()
            whole.append(time.perf_counter() - begin)
        inside.append(sum(seconds))
    return StepCost(
        int(median(counts)),
        median(whole),
        median(all_ - own for all_, own in zip(whole, inside, strict=True)),
    )


def _calls(work: Callable[[], object]) -> int:
    """How many functions are called; see `StepCost.calls`."""
    found = -1  # `setprofile`, which ends the count

    def event(frame: FrameType, kind: str, argument: Any) -> None:
        nonlocal found
        found += kind in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(event)
    try:
        work()
    finally:
        sys.setprofile(before)
    return found


@contextmanager
def _timed_functions(dtype: Any) -> Iterator[list[float]]:
    """The seconds of each call of a function in C++ for this dtype, inside this context."""
    found, seconds = few_rows.library(dtype), list[float]()
    names = [] if found is None else few_rows.FUNCTIONS
    plain = {name: getattr(found, name) for name in names}

    def timed(function: Any) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            begin = time.perf_counter()
            function(*arguments)
            seconds.append(time.perf_counter() - begin)

        return call

    for name, function in plain.items():
        setattr(found, name, timed(function))
    try:
        yield seconds
    finally:
        for name, function in plain.items():
            setattr(found, name, function)
