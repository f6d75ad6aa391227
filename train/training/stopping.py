"""Stops between two steps on request, without losing work."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# The exit status that a shell reports for a process ended by SIGTERM.
EXIT_STATUS = 128 + signal.SIGTERM


class Stopped(Exception):
    """Training stopped after a checkpoint because a signal asked for it."""


class StopRequest:
    """Records whether this process received SIGTERM or SIGINT. A second SIGINT interrupts at
    once."""

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside this context the two signals only set `asked`. Outside the main thread signals
        cannot be handled, so nothing changes there."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

        def note(number: int, _: FrameType | None) -> Any:
            if self.asked and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.asked = True

        try:
            for number in before:
                signal.signal(number, note)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
