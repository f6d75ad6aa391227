"""Pictures of a run: of the page of `draftsmith watch`, and of its report.

    python -m benchmarks.run_pages --run runs/quickstart --watch docs/watch.png
    python -m benchmarks.run_pages --run runs/quickstart --report docs/report.png

A run that is not finished has no report; the page of `watch` shows it at the moment of the picture.
Needs the extras serve and benchmarks, and a Chromium or Chrome.
"""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common import run_command
from benchmarks.shared.browser import find_browser, opened, served
from decode.base.errors import UserError
from draftsmith.watch.run_state import RunState
from draftsmith.watch.server import WatchServer

WIDTH = 1000  # pixels
WATCH_HEIGHT, REPORT_HEIGHT = 990, 1460  # pixels; what is below is not in the picture


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
        watched = partial(WatchServer, RunState(run))
        with served(watched) as address, opened(address, WIDTH, WATCH_HEIGHT) as page:
            page.wait_for_selector("#stages li")
            page.screenshot(path=watch)
    if report is not None:
        with opened(page_file.resolve().as_uri(), WIDTH, REPORT_HEIGHT) as page:
            page.screenshot(path=report)


if __name__ == "__main__":
    run_command(main)
