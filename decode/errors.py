"""The one exception that is shown to people without a traceback."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can mend: bad input, a missing file, parts that do not fit.

    The message says what was found, what was expected and what to do. The command line prints it
    alone and exits with status 2; anything else that is raised is a bug and keeps its traceback.
    """


def nearest(word: str, known: Iterable[str]) -> str:
    """' Did you mean "x"?' for the known word closest to `word`, or '' when none is close."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f' Did you mean "{matches[0]}"?' if matches else ""
