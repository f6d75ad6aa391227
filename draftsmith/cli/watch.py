"""`watch`: a local page that follows a run."""

from pathlib import Path
from typing import Annotated

import typer

from draftsmith.cli.command import require_packages, shows_errors


@shows_errors
def watch(
    run: Annotated[Path, typer.Argument(help="the directory of a run")],
    port: Annotated[int, typer.Option(help="0: any that is free")] = 8001,
) -> None:
    """Follow a run on a page of this machine: stage, time left, curves, acceptance, log. Reads the
    run's files and changes nothing. Ctrl-C ends it, not the run."""
    require_packages("starlette", "uvicorn")
    from draftsmith.net.listen import bind
    from draftsmith.watch.run_state import RunState
    from draftsmith.watch.server import HOST, WatchServer

    state = RunState(run)
    with bind(HOST, port) as bound:
        address = f"http://{HOST}:{bound.getsockname()[1]}/"
        WatchServer(state, lambda: typer.echo(f"{run} is at {address}")).run(sockets=[bound])
