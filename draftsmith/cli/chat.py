"""`chat`: a conversation in the terminal that shows which tokens were drafted."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decode.base.errors import UserError
from draftsmith.cli.command import (
    DtypeOption,
    Loading,
    PayingDrafts,
    TargetOption,
    TokensOption,
    read_schema,
    write_json,
)
from train.base.console import quieten

if TYPE_CHECKING:
    from decode.drafters import Drafter
    from decode.model.loading import Target

RUN = Path("runs/quickstart")


@dataclass(frozen=True, kw_only=True)
class ChatTarget(Loading):
    """`Loading`, with a target that needs no network, in the dtype that is fastest."""

    target: TargetOption = "embedded:smollm2-135m"
    dtype: DtypeOption = "fastest"


def chat(
    *,
    loading: ChatTarget,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="as for generate; default: ngram, then the drafter that comes with the target, or "
            f"the newest trained one of {RUN}"
        ),
    ] = None,
    decoding: PayingDrafts,
    max_new_tokens: TokensOption = 256,
    system: Annotated[str | None, typer.Option(help="a system message")] = None,
    schema: Annotated[
        Path | None,
        typer.Option(help="a file with a JSON Schema that each answer fits"),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(help="write a picture of the conversation here at the end")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write answers and figures here at the end")
    ] = None,
) -> None:
    """Talk with a target. Accepted draft tokens are green; each answer is followed by its figures.

    Messages come from the terminal, or line by line from a pipe. /help lists the commands. Ctrl-C
    ends an answer, Ctrl-D the program.
    """
    from decode.base.device import dtype_name
    from decode.grammars import Grammars
    from decode.opening.directory import open_drafter
    from decode.settings import DecodeSettings
    from draftsmith.chat.conversation import Conversation
    from draftsmith.chat.terminal import Terminal, make_console, read_line, write_svg

    quieten()
    settings = DecodeSettings(**decoding.settings)
    schema_text = read_schema(schema)
    console = make_console(colour=not os.environ.get("NO_COLOR"))
    target = loading.load(drafter, only_decodes=True)
    if schema_text is not None:
        grammar = Grammars.of(target).json_schema(schema_text)
        settings = replace(settings, sampling=replace(settings.sampling, grammar=grammar))
    if drafter is None:
        spec, opened, why = default_drafter(target, RUN)
    else:
        spec, opened, why = drafter, open_drafter(drafter, target), "as named"
    conversation = Conversation(
        target,
        opened,
        settings,
        max_new_tokens=max_new_tokens,
        seed=decoding.seed,
        system=system,
    )
    asides = console
    if not console.is_terminal:
        asides = type(console)(stderr=True, highlight=False, color_system=None)
    terminal = Terminal(
        conversation, console, asides, read_line, lambda name: open_drafter(name, target)
    )
    dtype = dtype_name(target.dtype)
    terminal.say(
        f"{loading.target} in {dtype} with the drafter {spec} ({why}). /help lists the commands."
    )
    if console.color_system is not None:
        terminal.say("Green: draft tokens that the target accepted. Plain: its own tokens.")
    terminal.run()
    write_json(json_file, [answer.to_dict() for answer in terminal.answers])
    if svg is not None:
        write_svg(svg, terminal.transcript, f"draftsmith chat --drafter {spec}")


def default_drafter(target: "Target", run: Path) -> tuple[str, "Drafter", str]:
    """The drafter if none is named: prompt lookup, and in turn with it the drafter that comes with
    draftsmith for this target, else the newest trained one of a run. The first had far more text
    than a quickstart. Returns its name, the drafter, and why it was chosen."""
    from decode.model.model_names import EMBEDDED_PREFIX
    from decode.opening.directory import describe_drafter, open_drafter
    from decode.opening.shipped import SHIPPED, shipped_names

    files = run.glob("stages/*/drafter/drafter.json")
    newest = max(files, key=lambda file: file.stat().st_mtime, default=None)
    choices = [
        (f"{EMBEDDED_PREFIX}{name}", "the drafter that comes along")
        for name in shipped_names()
        if describe_drafter(SHIPPED / name)["target"]["name"] == target.name
    ]
    if newest is not None:
        choices.append((str(newest.parent), f"the newest drafter of {run}"))
    why = f"{run} has no trained drafter"
    for number, (name, what) in enumerate(choices):
        try:
            drafter = open_drafter(f"ngram+{name}", target)
        except UserError as error:
            why = f"{name} does not fit: {error}"
            continue
        others = [f"; /drafter ngram+{other} takes {it}" for other, it in choices[number + 1 :]]
        return f"ngram+{name}", drafter, "".join([f"lookup, then {what}", *others])
    return "ngram", open_drafter("ngram", target), why
