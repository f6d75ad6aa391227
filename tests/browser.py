"""The browser in which tests look at pages."""

from benchmarks.shared.browser import find_browser
from decode.base.errors import UserError
from tests.export import require_environment


def browser_path() -> str:
    """Skips the test where no browser is; fails it where DRAFTSMITH_NEED_ENGINES names chromium."""
    try:
        return find_browser()
    except UserError as error:
        require_environment("chromium", str(error), "apt install chromium")
        raise
