"""Only one process works in a directory, of a run or of a learner."""

import errno
import os
import socket
import time
from pathlib import Path

from decode.base.errors import UserError
from train.base.file_lock import lock_file

LOCK_FILE = ".lock"
# What a file system answers that has no locks.
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class DirectoryLock:
    """The lock of a directory, to be taken inside a `with`.

    Its file names the host and the process that hold it. The system frees a lock when its process
    ends, so a kill leaves none behind. A network file system holds it for all machines; one
    without locks holds it for none.
    """

    def __init__(self, directory: Path, advice: str) -> None:
        """advice: what to do if another process holds the lock, for the message."""
        self.path, self.advice = directory / LOCK_FILE, advice
        self._fd: int | None = None

    @property
    def held(self) -> bool:
        return self._fd is not None

    def take(self) -> None:
        """Take the lock, unless it is held here already. The directory must exist. Raises UserError
        if another process holds it."""
        if self._fd is not None:
            return
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            self._lock(self._fd)
        except OSError as error:
            raise UserError(f"cannot lock {self.path}: {error.strerror}") from error

    def _lock(self, fd: int) -> None:
        try:
            lock_file(fd)
        except (BlockingIOError, PermissionError):  # EAGAIN, or EACCES on some systems
            os.lseek(fd, 0, os.SEEK_SET)
            holder = os.read(fd, 500).decode(errors="replace") or "another process"
            raise UserError(f"{holder} works in {self.path.parent}; {self.advice}") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        os.ftruncate(fd, 0)
        os.lseek(fd, 0, os.SEEK_SET)
        holder = f"process {os.getpid()} on {socket.gethostname()} (since {time.ctime()})"
        os.write(fd, holder.encode())

    def __enter__(self) -> "DirectoryLock":
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
