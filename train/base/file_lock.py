"""Locks of files, on Linux, macOS and Windows."""

import os
import sys
import time

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

# Windows locks bytes, which others then cannot read: not those of the text.
_FAR = 1 << 30


def lock_file(fd: int, *, wait: bool = False, shared: bool = False) -> None:
    """Lock an open file until it is closed, which the system does if its process ends.

    wait: until the lock is free. Else a lock that is taken raises BlockingIOError, or on some file
    systems PermissionError. shared: several may have it, where no one has it alone; on Windows no
    two have it. Raises OSError for a file system without locks.
    """
    if sys.platform == "win32":
        while True:
            os.lseek(fd, _FAR, os.SEEK_SET)
            try:
                msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
                return
            except PermissionError:
                if not wait:
                    raise
            time.sleep(0.05)
    fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
