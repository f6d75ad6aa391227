"""`chat`: a conversation in the terminal that shows which tokens were drafted."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decode.errors import UserError
from train.cli.command import (
    DecodeOptions,
    Loading,
    TargetOption,
    TokensOption,
    quieten,
    shows_errors,
    takes_groups,
)

if TYPE_CHECKING:
    from decode.drafters import Drafter
    from decode.target.loading import Target

RUN = Path("runs/quickstart")


@dataclass(frozen=True, kw_only=True)
class ChatTarget(Loading):
    """`Loading`, with a target that needs no network."""

    target: TargetOption = "embedded:smollm2-135m"


@shows_errors
@takes_groups
def chat(
    *,
    loading: ChatTarget,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="as for generate; default: ngram, then the newest trained drafter of "
            f"{RUN}, or the one that comes with the target"
        ),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="begin without drafts")] = False,
    decoding: DecodeOptions,
    max_new_tokens: TokensOption = 256,
    system: Annotated[str | None, typer.Option(help="a system message")] = None,
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
    import heads  # noqa: F401  (registers its drafters)
    from decode.artifact import write_file
    from decode.drafters.directory import open_drafter
    from decode.settings import DecodeSettings
    from train.chat.conversation import Conversation
    from train.chat.terminal import Terminal, make_console, read_line, write_svg

    quieten()
    settings = DecodeSettings(**decoding.settings)
    console = make_console(colour=not os.environ.get("NO_COLOR"))
    target = loading.load()
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
    conversation.plain = plain
    asides = console
    if not console.is_terminal:
        asides = type(console)(stderr=True, highlight=False, color_system=None)
    terminal = Terminal(
        conversation, console, asides, read_line, lambda name: open_drafter(name, target)
    )
    terminal.say(f"{loading.target} with the drafter {spec} ({why}). /help lists the commands.")
    if console.color_system is not None:
        terminal.say("Green: draft tokens that the target accepted. Plain: its own tokens.")
    terminal.run()
    if json_file is not None:
        answers = [answer.to_dict() for answer in terminal.answers]
        write_file(json_file, json.dumps(answers, indent=2))
    if svg is not None:
        write_svg(svg, terminal.transcript, f"draftsmith chat --drafter {spec}")


def default_drafter(target: "Target", run: Path) -> tuple[str, "Drafter", str]:
    """The drafter if none is named: prompt lookup, and in turn with it the newest trained drafter
    of a run, or the one that comes with draftsmith. Returns its name, the drafter, and why it was
    chosen."""
    from decode.drafters.directory import describe_drafter, open_drafter
    from decode.drafters.shipped import SHIPPED, shipped_names
    from decode.target.loading import EMBEDDED_PREFIX

    files = run.glob("stages/*/drafter/drafter.json")
    newest = max(files, key=lambda file: file.stat().st_mtime, default=None)
    why = f"{run} has no trained drafter"
    if newest is not None:
        spec = f"ngram+{newest.parent}"
        try:
            return spec, open_drafter(spec, target), f"lookup, then the newest drafter of {run}"
        except UserError as error:
            why = f"{newest.parent} does not fit: {error}"
    for name in shipped_names():
        if describe_drafter(SHIPPED / name)["target"]["name"] == target.name:
            spec = f"ngram+{EMBEDDED_PREFIX}{name}"
            try:
                return spec, open_drafter(spec, target), "lookup, then the drafter that comes along"
            except UserError as error:
                why = f"{name} does not fit: {error}"
    return "ngram", open_drafter("ngram", target), why
