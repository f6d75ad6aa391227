"""`draftsmith audit`: judges from outside whether an engine's text is the target's.

The options of an audit are here, so the command line can read them without loading torch.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer


@dataclass(frozen=True, kw_only=True)
class JudgingOptions:
    """What is asked, and how it is judged: see `AuditOptions`. The annotations are those of the
    command line."""

    PANEL: ClassVar[str] = "What is asked, and how it is judged"

    samples: Annotated[int, typer.Option(help="sampled answers to each prompt")] = 8
    max_new_tokens: Annotated[int, typer.Option(help="length of an answer, in tokens")] = 64
    exact: Annotated[
        int | None,
        typer.Option(
            help="short answers for the joint law of their first tokens; default: "
            "8192 if the vocabulary is tiny, else 0"
        ),
    ] = None
    # The token of the prompt's pass, a draft of three, and the token after it.
    exact_tokens: Annotated[int, typer.Option(help="length of a short answer, in tokens")] = 5
    level: Annotated[
        float, typer.Option(help="probability that a server without error is called wrong")
    ] = 1e-3
    engine_dtype: Annotated[
        str | None,
        typer.Option(help="what the server computes in; default: the target's dtype here"),
    ] = None
    rounding: Annotated[
        float | None, typer.Option(help="of logits, in place of what the dtype says")
    ] = None
