"""Which thread computes."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


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
