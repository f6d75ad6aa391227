"""Pictures of pages of this package, through playwright with a Chromium that is installed."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from decode.base.errors import UserError
from draftsmith.net.listen import bind

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from draftsmith.net.http_server import HttpServer

HOST = "127.0.0.1"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str:
    """The path of a browser. Raises UserError if there is none."""
    for name in BROWSERS:
        if path := shutil.which(name):
            return path
    raise UserError(f"no browser is installed; expected one of {', '.join(BROWSERS)}")


@contextmanager
def opened(url: str, width: int, height: int, *, scale: int = 1) -> Iterator["Page"]:
    """The page at an address, in the light theme. width, height: of the window in CSS pixels.
    scale: pixels of a picture for each of them. Raises UserError if there is no browser."""
    from playwright.sync_api import sync_playwright

    path = find_browser()
    with sync_playwright() as session:
        browser = session.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": width, "height": height},
            device_scale_factor=scale,
            color_scheme="light",
        )
        page.goto(url)
        yield page
        browser.close()


@contextmanager
def served(make: Callable[[Callable[[], None]], "HttpServer"]) -> Iterator[str]:
    """The address of a server of this package, which runs in a thread of its own and ends with the
    context. make: makes it; gets what the server calls when it listens."""
    listening = threading.Event()
    with bind(HOST, 0) as bound:
        server = make(listening.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            listening.wait(60)
            yield f"http://{HOST}:{bound.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join(30)
