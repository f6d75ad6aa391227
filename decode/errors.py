"""The only exception that users see without a traceback."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A problem that the user can fix: bad input, a missing file, parts that do not fit.

    The message says what was found, what was expected and what to do. The command line prints only
    the message and exits with status 2. Any other exception is a bug and keeps its traceback.
    """


def nearest(word: str, known: Iterable[str]) -> str:
    """' Did you mean "x"?' with the known word closest to `word`, or '' if none is close."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f' Did you mean "{matches[0]}"?' if matches else ""
