"""A picture of the page of `draftsmith serve`, with an answer of the embedded target.

    python -m benchmarks.serve.page --drafter DIR --out docs/serving_page.png

Needs the extras serve and benchmarks, and a Chromium or Chrome.
"""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common import TARGET, DeviceOption, TargetOption, run_command, start_benchmark
from benchmarks.shared.browser import find_browser, opened, served
from decode.model.loading import load_target
from decode.opening.directory import open_drafter
from decode.settings import DecodeSettings
from draftsmith.serve.batching.requests import RequestBounds
from draftsmith.serve.server import ServiceServer, make_service

QUESTION = "Why is the sky blue?"
LONGEST_MS = 300_000  # for one answer
TOKENS = 160  # of the answer


def take_picture(url: str, out: Path, question: str) -> None:
    """Ask a question on the page at this address, and write what it looks like as a PNG file."""
    with opened(url, 1200, 760, scale=2) as page:
        page.set_default_timeout(LONGEST_MS)
        page.wait_for_selector("#setting-gamma")
        page.check("#show-rejected")
        page.fill("#max-tokens", str(TOKENS))
        page.fill("#prompt", question)
        page.press("#prompt", "Enter")
        page.wait_for_selector(".assistant .figures")
        page.screenshot(path=out)


def main(
    drafter: Annotated[str, typer.Option(help="a name, or a directory with a trained drafter")],
    out: Annotated[Path, typer.Option(help="the PNG file to write")],
    target: TargetOption = TARGET,
    question: Annotated[str, typer.Option(help="what the page asks")] = QUESTION,
    gamma: Annotated[int, typer.Option(help="the draft length")] = 4,
    device: DeviceOption = "auto",
) -> None:
    """Serve the target, ask it a question on its page, and write a picture of that."""
    start_benchmark()
    find_browser()
    import heads.kinds  # noqa: F401  (registers its drafters)

    loaded = load_target(target, device=device)
    service = make_service(
        loaded,
        open_drafter(drafter, loaded),
        DecodeSettings(gamma=gamma),
        RequestBounds(),
        drafter_name=Path(drafter).name,
        model_name=target.rpartition(":")[2],
    )
    with served(partial(ServiceServer, service, 0)) as address:
        try:
            take_picture(address, out, question)
        finally:
            service.batcher.drain(0)
            service.batcher.join(30)


if __name__ == "__main__":
    run_command(main)
