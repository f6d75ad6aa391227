"""Pictures of a run: of the page of `draftsmith watch`, and of its report.

    python -m benchmarks.run_pages --run runs/quickstart --watch docs/watch.png
    python -m benchmarks.run_pages --run runs/quickstart --report docs/report.png

A run that is not finished has no report; the page of `watch` shows it at the moment of the picture.
Needs the extras serve and benchmarks, and a Chromium or Chrome.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common import run_command
from benchmarks.shared.browser import find_browser, opened
from decode.base.errors import UserError
from draftsmith.net.listen import bind
from draftsmith.watch.run_state import RunState
from draftsmith.watch.server import HOST, WatchServer

WIDTH = 1000  # pixels
WATCH_HEIGHT, REPORT_HEIGHT = 990, 1460  # pixels; what is below is not in the picture


@contextmanager
def watched(run: Path) -> Iterator[str]:
    """The address of the page that follows a run."""
    listening = threading.Event()
    with bind(HOST, 0) as bound:
        server = WatchServer(RunState(run), listening.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            listening.wait(60)
            yield f"http://{HOST}:{bound.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join(30)


def main(
    run: Annotated[Path, typer.Option(help="the directory of a run")],
    watch: Annotated[
        Path | None, typer.Option(help="the PNG file to write of the page of `watch`")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="the PNG file to write of report.html")
    ] = None,
) -> None:
    """Write pictures of a run's pages."""
    if watch is None and report is None:
        raise UserError("nothing to do: give --watch FILE, --report FILE or both")
    find_browser()
    page_file = run / "report.html"
    if report is not None and not page_file.is_file():
        raise UserError(f"{run} has no report.html; finish the run first")
    if watch is not None:
        with watched(run) as address, opened(address, WIDTH, WATCH_HEIGHT) as page:
            page.wait_for_selector("#stages li")
            page.screenshot(path=watch)
    if report is not None:
        with opened(page_file.resolve().as_uri(), WIDTH, REPORT_HEIGHT) as page:
            page.screenshot(path=report)


if __name__ == "__main__":
    run_command(main)
