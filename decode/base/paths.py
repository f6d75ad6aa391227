"""Paths that users write."""

import os
from pathlib import Path


def from_home(path: str | Path) -> Path:
    """The path, with the home of the user for `~`, and of another one for `~NAME`. Without such a
    user it stays as it is, as in a shell: a file may have this name.

    >>> from_home("~no-such-user/x").parts
    ('~no-such-user', 'x')
    """
    return Path(os.path.expanduser(path))


def fault_of(path: str | Path) -> str | None:
    """Why the system can have no file at this path: a name is too long, or a file is where a
    directory would have to be. None: it can."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror
    return None
