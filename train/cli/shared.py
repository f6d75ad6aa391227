"""Code that all commands share: the app, the display of errors, the log levels of libraries."""

import logging
import os
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import typer
from rich.console import Console

from decode.errors import UserError

app = typer.Typer(
    help="Trains drafters for speculative decoding and measures what they are worth.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


def shows_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn a UserError into one message on stderr and exit status 2."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except UserError as error:
            errors = Console(stderr=True, highlight=False, soft_wrap=True)
            errors.print(f"error: {error}", markup=False)
            raise typer.Exit(2) from None

    return run


def cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def quieten() -> None:
    """Silence messages of libraries that users can do nothing about."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # At every checkpoint of a tied model, accelerate reports that it stores the tied weight once.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
