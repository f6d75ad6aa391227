"""The only exception that users see without a traceback."""

import difflib
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any


class UserError(Exception):
    """A problem that the user can fix: bad input, a missing file, parts that do not fit.

    The message says what was found, what was expected and what to do. The command line prints only
    the message and exits with status 2. Any other exception is a bug and keeps its traceback.
    """


class MemoryShortage(UserError):
    """Memory is missing now. It may be there when other texts have ended."""


def require_whole(least: int = 1, most: int | None = None, /, **options: object) -> None:
    """Raises UserError unless all these options are whole numbers from `least` to `most`. None: no
    upper limit. A bool is no number."""
    span = f"≥ {least}" if most is None else f"from {least} to {most}"
    for name, value in options.items():
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        if not whole or value < least or (most is not None and value > most):  # type: ignore[operator]
            raise UserError(f"{name} is {value!r}; expected a whole number {span}")


def require_fits(fits: Callable[[Any], bool], expected: str, /, **options: Any) -> None:
    """Raises UserError unless all these options fit. expected: which values do, for the message."""
    for name, value in options.items():
        if not fits(value):
            raise UserError(f"{name} is {value}; expected {expected}")


# Common names, with the names that draftsmith uses instead.
SYNONYMS = {
    "batch_size": ("tokens_per_batch",),
    "ce": ("cross_entropy",),
    "eagle": ("eagle1",),
    "eagle2": ("eagle1",),  # EAGLE-2 is EAGLE-1 with the shape `dynamic`
    "float32": ("no",),
    "fp32": ("float32", "no"),
    "greedy": ("exact",),
    "half": ("float16", "fp16"),
    "hydra++": ("hydra_plus",),
    "kl": ("forward_kl",),
    "learning_rate": ("lr",),
    "lk": ("lk_hybrid",),
    "lk_alpha": ("negative_log_acceptance",),
    "lk_lambda": ("lk_hybrid",),
    "nla": ("negative_log_acceptance",),
    "nll": ("cross_entropy",),
    "prompt_lookup": ("ngram",),
    "rejection_sampling": ("speculative",),
    "rkl": ("reverse_kl",),
    "tv": ("total_variation",),
    "tvd": ("total_variation",),
}


def nearest(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """' Did you mean "x"?' with a known word that means the same as `word` or is spelt most like
    it, or '' if there is none. cutoff: the least likeness of the two, from 0 to 1."""
    words = list(known)
    matches = [synonym for synonym in SYNONYMS.get(word.lower(), ()) if synonym in words]
    matches = matches or difflib.get_close_matches(word, words, n=1, cutoff=cutoff)
    return f' Did you mean "{matches[0]}"?' if matches else ""
