"""A picture of the page of `draftsmith serve`, with an answer of the embedded target.

    python -m tools.page_picture --drafter DIR --out docs/serving_page.png

Needs the extras serve and benchmarks, and a Chromium or Chrome.
"""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common import TARGET, TargetOption, run_command, start_benchmark
from benchmarks.serve.process import ServiceProcess, command
from decode.base.errors import UserError

QUESTION = "Why is the sky blue?"
LONGEST_MS = 300_000  # for one answer
TOKENS = 160  # of the answer
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str:
    """The path of a browser. Raises UserError if there is none."""
    for name in BROWSERS:
        if path := shutil.which(name):
            return path
    raise UserError(f"no browser is installed; expected one of {', '.join(BROWSERS)}")


def take_picture(url: str, out: Path, question: str) -> None:
    """Ask a question on the page at this address, and write what it looks like as a PNG file."""
    from playwright.sync_api import sync_playwright

    path = find_browser()
    with sync_playwright() as session:
        browser = session.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": 1200, "height": 760}, device_scale_factor=2, color_scheme="light"
        )
        page.goto(url)
        page.set_default_timeout(LONGEST_MS)
        page.wait_for_selector("#setting-gamma")
        page.check("#show-rejected")
        page.fill("#max-tokens", str(TOKENS))
        page.fill("#prompt", question)
        page.press("#prompt", "Enter")
        page.wait_for_selector(".assistant .figures")
        page.screenshot(path=out)
        browser.close()


def main(
    drafter: Annotated[str, typer.Option(help="a name, or a directory with a trained drafter")],
    out: Annotated[Path, typer.Option(help="the PNG file to write")],
    target: TargetOption = TARGET,
    question: Annotated[str, typer.Option(help="what the page asks")] = QUESTION,
) -> None:
    """Serve the target, ask it a question on its page, and write a picture of that."""
    start_benchmark()
    find_browser()
    name = target.rpartition(":")[2]
    words = ("--target", target, "--drafter", drafter, "--model-name", name)
    with ServiceProcess(command("serve", *words)) as service:
        take_picture(service.url, out, question)


if __name__ == "__main__":
    run_command(main)
