"""Which thread computes."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from itertools import count
from types import TracebackType
from typing import TypeVar

from decode.base.errors import UserError

T = TypeVar("T")
_numbers = count()


def run_in_thread(work: Callable[[], T], name: str = "prepare") -> "Future[T]":
    """Do `work` in a thread that ends with it. name: of the thread.

    For what prepares a decode that another thread runs. A thread that has computed on a CPU keeps
    its OpenMP threads until it ends. While two threads have some, there are more of them than
    cores, so GCC's OpenMP lets them sleep between two operations. A step of a small model on two
    cores then takes nearly twice as long.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


class OneAtATime:
    """A context that one thread enters at a time; others wait. what: its name in messages. Raises
    UserError in the thread that is inside already, which would wait for itself. A copy is another
    one, which nobody has entered."""

    def __init__(self, what: str) -> None:
        self._what, self._lock = what, threading.Lock()
        self._inside: int | None = None  # the thread
        self.number = next(_numbers)  # whoever enters several does so in this order

    @property
    def each(self) -> "list[OneAtATime]":
        """Those that are entered with it, each once."""
        return [self]

    @property
    def entered_here(self) -> bool:
        """Whether this thread is inside."""
        return self._inside == threading.get_ident()

    def __reduce__(self) -> tuple[type["OneAtATime"], tuple[str]]:
        return type(self), (self._what,)

    def __enter__(self) -> None:
        if self.entered_here:
            raise UserError(
                f"{self._what} is called while it decodes, by a function that it called itself; "
                "call it after that decode, or make another one with its own drafter"
            )
        self._lock.acquire()
        self._inside = threading.get_ident()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inside = None
        self._lock.release()


class Together(ExitStack):
    """A context that enters several `OneAtATime`, each once. Two threads that want some of the same
    never wait for each other. Raises UserError as they do, and has then entered none."""

    def __init__(self, turns: "Iterable[OneAtATime | Together]") -> None:
        super().__init__()
        every: set[OneAtATime] = {turn for some in turns for turn in some.each}
        self.each: list[OneAtATime] = sorted(every, key=lambda turn: turn.number)

    def __enter__(self) -> "Together":
        with ExitStack() as entered:
            for turn in self.each:
                entered.enter_context(turn)
            self.push(entered.pop_all())
        return self
