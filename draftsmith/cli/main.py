"""The command line: `draftsmith train | evaluate | chat | export | serve` and more."""

import re
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
from draftsmith.cli.init import init, quickstart
from draftsmith.cli.learn import forget, learn, record
from draftsmith.cli.serve import serve
from draftsmith.cli.train import compare, train, verify_cache, watch


def help_text(docstring: str) -> str:
    """The docstring with one line for each paragraph, so that the terminal wraps it."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", docstring)


app = typer.Typer(no_args_is_help=True, pretty_exceptions_show_locals=False)


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
) -> None:
    """Trains drafters for speculative decoding and measures what they are worth."""


for command in (
    quickstart,
    init,
    train,
    verify_cache,
    watch,
    compare,
    evaluate,
    generate,
    chat,
    calibrate,
    calibrate_tree,
    calibrate_layers,
    coverage,
    inspect,
    merge,
    export,
    import_drafter,
    serve,
    verify_server,
    record,
    forget,
    learn,
    audit,
    audit_models,
    diagnose,
    doctor,
):
    # `import` is a word of Python, so the function has another name.
    name = "import" if command is import_drafter else None
    app.command(name, help=help_text(getdoc(command) or ""))(shows_errors(takes_groups(command)))


def main() -> None:
    """The entry point of the `draftsmith` command."""
    app()


if __name__ == "__main__":
    main()
