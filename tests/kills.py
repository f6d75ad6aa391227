"""Kills of a process at its changes to the disk, and a disk that is full."""

import errno
import os
import signal
from collections.abc import Callable
from types import ModuleType
from typing import Any


def kill_at_change(n: int, *more: tuple[ModuleType, str]) -> None:
    """From now on, kill this process before its n-th change to the disk: a call of `os`, or of the
    functions in `more`."""
    left = n

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapped

    changes = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync")
    for place, name in (*((os, change) for change in changes), *more):
        setattr(place, name, counted(getattr(place, name)))


class FullDisk:
    """Fails from the n-th write on: a full disk stays full."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*args, **kwargs)

        return wrapped
