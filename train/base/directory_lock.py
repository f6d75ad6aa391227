"""Only one process works in a directory, of a run or of a learner."""

import errno
import os
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from decode.base.errors import UserError
from train.base.file_lock import lock_file

LOCK_FILE = ".lock"
# What a file system answers that has no locks, or none of directories.
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF, errno.EISDIR)


class DirectoryLock:
    """The lock of a directory, to be taken inside a `with`.

    Its file names the host and the process that hold it. The directory itself is locked too, where
    a system can: someone may delete the file. The system frees a lock when its process ends, so a
    kill leaves none behind. A network file system holds it for all machines; one without locks
    holds it for none.
    """

    def __init__(self, directory: Path, advice: str) -> None:
        """advice: what to do if another process holds the lock, for the message."""
        self.path, self.advice = directory / LOCK_FILE, advice
        self._open: ExitStack | None = None

    @property
    def held(self) -> bool:
        return self._open is not None

    def take(self) -> None:
        """Take the lock, unless it is held here already. The directory must exist. Raises UserError
        if another process holds it."""
        if self._open is not None:
            return
        try:
            with ExitStack() as stack:
                if sys.platform != "win32":  # which deletes no file that is open
                    self._lock(stack, self.path.parent, os.O_RDONLY)
                fd = self._lock(stack, self.path, os.O_RDWR | os.O_CREAT)
                os.ftruncate(fd, 0)
                holder = f"process {os.getpid()} on {socket.gethostname()} (since {time.ctime()})"
                os.write(fd, holder.encode())
                self._open = stack.pop_all()
        except OSError as error:
            raise UserError(f"cannot lock {self.path}: {error.strerror}") from error

    def _lock(self, stack: ExitStack, path: Path, flags: int) -> int:
        """Open and lock a file or a directory, as long as `stack` is open."""
        fd = os.open(path, flags, 0o644)
        stack.callback(os.close, fd)
        try:
            lock_file(fd)
        except (BlockingIOError, PermissionError):  # EAGAIN, or EACCES on some systems
            raise UserError(
                f"{self._holder()} works in {self.path.parent}; {self.advice}"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        return fd

    def _holder(self) -> str:
        try:
            return self.path.read_text("utf-8", errors="replace")[:500] or "another process"
        except OSError:
            return "another process"

    def __enter__(self) -> "DirectoryLock":
        return self

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None
