"""What a decode step costs beside the functions in C++: calls of Python, and time outside of them.

Calls do not depend on the machine's speed, so they can be compared and asserted.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
    functions in C++. by_function: calls per step of each function, as its file and name, or as the
    module and name of a built-in one; the most first."""

    calls: int
    seconds: float
    outside: float
    by_function: dict[tuple[str, str], float] = field(default_factory=dict, repr=False)


def step_cost(decoding: Decoding, steps: int) -> StepCost:
    """Take `steps` steps of running rows to count calls, and as many to take times, after some that
    do not count. No row may end before that."""
    for _ in range(WARM_UP):
        decoding.step()
    counts, functions = [], Counter[tuple[str, str]]()
    for _ in range(steps):
        entered = _entered(decoding.step)
        counts.append(entered.total())
        functions += entered
    whole, inside = [], []
    for _ in range(steps):
        with _timed_functions(decoding.setup.lm.model.dtype) as seconds:
            begin = time.perf_counter()
            decoding.step()
            whole.append(time.perf_counter() - begin)
        inside.append(sum(seconds))
    return StepCost(
        int(median(counts)),
        median(whole),
        median(all_ - own for all_, own in zip(whole, inside, strict=True)),
        {key: count / steps for key, count in functions.most_common()},
    )


def _entered(work: Callable[[], object]) -> Counter[tuple[str, str]]:
    """How often each function is called; see `StepCost.by_function`."""
    found = Counter[tuple[str, str]]()

    def event(frame: FrameType, kind: str, argument: Any) -> None:
        if kind == "call":
            found[frame.f_code.co_filename, frame.f_code.co_qualname] += 1
        elif kind == "c_call":
            found[argument.__module__ or "", argument.__qualname__] += 1

    before = sys.getprofile()
    sys.setprofile(event)
    try:
        work()
    finally:
        sys.setprofile(before)
    found.subtract([("sys", "setprofile")])  # the end of the count
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
