"""The command line: `draftsmith train | evaluate | chat | export | serve` and more."""

import re
from collections.abc import Callable
from importlib.metadata import version
from inspect import getdoc
from typing import Annotated

import typer

from draftsmith.cli.audit import audit, audit_models
from draftsmith.cli.calibrate import calibrate, calibrate_layers, calibrate_tree
from draftsmith.cli.chat import chat
from draftsmith.cli.command import shows_errors, takes_groups
from draftsmith.cli.diagnose import diagnose
from draftsmith.cli.doctor import doctor
from draftsmith.cli.drafter_commands import coverage, evaluate, generate, inspect, merge
from draftsmith.cli.edge import verify_server
from draftsmith.cli.export import export, import_drafter
from draftsmith.cli.forecast import forecast
from draftsmith.cli.init import init, quickstart
from draftsmith.cli.learn import forget, learn, record
from draftsmith.cli.serve import serve
from draftsmith.cli.short_help import (
    HelpAll,
    ShortCommand,
    ShortGroup,
    panels,
    with_short_help,
)
from draftsmith.cli.train import compare, train, verify_cache, watch


def help_text(docstring: str) -> str:
    """The docstring with one line for each paragraph, so that the terminal wraps it."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", docstring)


def first_sentence(text: str) -> str:
    """What a list of commands says of one.

    >>> first_sentence("Does one thing: that. And another.")
    'Does one thing'
    """
    return re.split(r"[.:;](?:\s|$)", text)[0]


app = typer.Typer(cls=ShortGroup, no_args_is_help=True, pretty_exceptions_show_locals=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"draftsmith {version('draftsmith')}")
        raise typer.Exit


@app.callback()
def common(
    wanted: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="print the version and stop"
        ),
    ] = False,
    help_all: HelpAll = False,
) -> None:
    """Trains drafters for speculative decoding and measures what they are worth."""


# The commands by panel, and the options of each that its help describes; "" for all of them. The
# commands without a panel are those that a new user needs.
COMMANDS: dict[str | None, dict[Callable[..., None], str]] = {
    None: {
        chat: "target drafter dtype temperature gamma max_new_tokens system",
        quickstart: "",
        init: "",
        train: "dry_run speed",
        forecast: "",
        evaluate: "target drafters prompts limit dtype gamma temperature max_new_tokens",
        generate: "target drafter dtype gamma temperature max_new_tokens trace",
        export: "form out prompts limit verify engine_python concurrency",
        serve: "target drafter dtype host port api_key_env gamma learn",
        audit: "target drafter gamma prompts limit dtype key_env html",
        diagnose: "target drafter run gamma prompts limit dtype json_file",
        doctor: "",
    },
    "Runs": {compare: "", watch: "", verify_cache: ""},
    "Drafters": {
        import_drafter: "target out prompts form gamma",
        inspect: "",
        merge: "",
        calibrate: "target drafter prompts thresholds acceptance limit json_file",
        calibrate_tree: "target drafter prompts nodes out limit",
        calibrate_layers: "target prompts out depth limit",
        coverage: "",
    },
    "Servers": {
        record: "upstream out host port keep_days admin_key_env",
        learn: "",
        forget: "",
        verify_server: "target rule dtype host port api_key_env",
        audit_models: "",
    },
}
for panel, commands in COMMANDS.items():
    for command, first in commands.items():
        run = with_short_help(takes_groups(command), first, panels(command))
        text = help_text(getdoc(command) or "")
        app.command(
            # `import` is a word of Python, so the function has another name.
            "import" if command is import_drafter else None,
            cls=ShortCommand,
            help=text,
            short_help=first_sentence(text),
            rich_help_panel=panel,
        )(shows_errors(run))


def main() -> None:
    """The entry point of the `draftsmith` command."""
    app()


if __name__ == "__main__":
    main()
