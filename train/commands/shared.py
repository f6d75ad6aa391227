"""What all commands share: the app, their common options, how errors are shown."""

import logging
import os
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer
from rich.console import Console

from decode.errors import UserError

app = typer.Typer(
    help="Trains drafters for speculative decoding and measures what they are worth.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)

TargetOption = Annotated[
    str, typer.Option(help="hub id, directory, GGUF file, or embedded:smollm2-135m")
]
DrafterOption = Annotated[
    str,
    typer.Option(
        help="none, ngram, store, a drafter directory, a smaller model's id or path, or several "
        "with + between them"
    ),
]
GammaOption = Annotated[
    int | None,
    typer.Option(
        help="how many tokens a draft is deep; default 4. A tree is as deep as it is: what cuts it "
        "is --policy fixed:most=N"
    ),
]
TemperatureOption = Annotated[float, typer.Option(help="0: greedy")]
TopKOption = Annotated[int, typer.Option(help="0: off")]
TopPOption = Annotated[float, typer.Option(help="1: off")]
MinPOption = Annotated[float, typer.Option(help="0: off")]
PenaltyOption = Annotated[float, typer.Option("--repetition-penalty", help="1: off")]
DraftTemperatureOption = Annotated[
    float | None, typer.Option(help="the drafter's temperature; default the target's")
]
RuleOption = Annotated[
    str | None,
    typer.Option(
        help="verification rule: NAME or NAME:option=value,…; default speculative, for trees "
        "multi_round"
    ),
]
PolicyOption = Annotated[
    str, typer.Option(help="draft-length policy: NAME or NAME:option=value,…; most is --gamma")
]
ShapeOption = Annotated[
    str | None,
    typer.Option(
        help="shape of the drafts: NAME or NAME:option=value,…; default the tree that the drafter "
        "is stored with, or a chain"
    ),
]
DtypeOption = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps")]
# Tokens of a draft where nothing says otherwise.
GAMMA = 4
TokensOption = Annotated[int, typer.Option(help="length limit of an answer, in tokens")]


def shows_errors(command: Callable[..., None]) -> Callable[..., None]:
    """User errors become one message on stderr and exit status 2."""

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
    """How many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def quieten() -> None:
    """Keep libraries from writing between our lines what users can do nothing about."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # At every checkpoint of a tied model it tells that the tied weight is kept once.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
