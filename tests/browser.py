"""The browser in which tests look at pages, and a page in it."""

import contextlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import sync_playwright

from decode.base.errors import UserError
from tests.export import require_environment
from tools.page_picture import find_browser

HOSTILE = '<script>window.hit = 1</script><img src="x" onerror="window.hit = 1">'


@contextlib.contextmanager
def open_browser() -> Iterator[Any]:
    """Skips the test where no browser is."""
    try:
        path = find_browser()
    except UserError as error:
        require_environment(str(error), "apt-get install chromium")
        raise
    with sync_playwright() as session:
        opened = session.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


class Visit:
    """The page in a browser, with what it asks for and complains about. Tests wait for selectors:
    `wait_for_function` needs eval, which the page's policy forbids."""

    def __init__(self, browser: Any, url: str) -> None:
        self.page = browser.new_page()
        self.page.set_default_timeout(60_000)
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on(
            "console",
            lambda said: self.errors.append(said.text) if said.type in ("error", "warning") else 0,
        )
        self.page.on("request", lambda asked: self.hosts.add(urlsplit(asked.url).netloc))
        self.page.goto(url)

    def ask(self, text: str) -> None:
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def until_answered(self) -> None:
        self.page.wait_for_selector("#stop[disabled]")
