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
