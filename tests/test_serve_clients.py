"""The clients that users have, at `draftsmith serve` with the embedded target and the drafter that
comes along: curl and the page get the same text."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.serve.client import Answer, ask
from benchmarks.serve.process import MODEL, ServiceProcess, serve_command
from tests.browser import Visit

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.thorough]

QUESTION, TOKENS = "Why is the sky blue?", 16
BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": TOKENS,
}


@pytest.fixture(scope="module")
def service() -> Iterator[tuple[str, Answer]]:
    """The address of a service, greedy by default and in float32, and an answer of it."""
    target, drafter = "embedded:smollm2-135m", "embedded:eagle1-smollm2-135m"
    options = ("--device", "cpu", "--dtype", "float32", "--temperature", "0")
    options += ("--policy", "fixed")  # the page's answer has as many drafts as this one
    with ServiceProcess(serve_command(target, drafter, *options)) as process:
        answer = ask(process.url, BODY)
        assert answer.complete
        assert answer.usage["completion_tokens"] == TOKENS
        assert answer.counts["accepted"] > 0
        yield process.url, answer


@pytest.mark.parametrize("stream", [True, False])
def test_curl(service: tuple[str, Answer], stream: bool) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed; install it with: apt-get install curl")
    url, answer = service
    body = json.dumps(BODY | {"stream": stream})
    header = ("-H", "Content-Type: application/json")
    command = ["curl", "-sS", f"{url}/v1/chat/completions", *header, "-d", body]
    said = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    events = said.split(b"\n\n") if stream else [b"data: " + said]
    data = [event.removeprefix(b"data: ") for event in events]
    choices = [choice for one in data if one[:1] == b"{" for choice in json.loads(one)["choices"]]
    parts = [choice.get("delta") or choice.get("message") or {} for choice in choices]
    assert "".join(part.get("content") or "" for part in parts) == answer.texts[0]
    assert b"[DONE]" in data or not stream


def test_the_page(service: tuple[str, Answer], browser: Any) -> None:
    url, answer = service
    visit = Visit(browser, url)
    page = visit.page
    page.wait_for_selector(f"#model:text-is('{MODEL}')")
    page.fill("#max-tokens", str(TOKENS))
    visit.ask(QUESTION)
    page.wait_for_selector(".assistant .figures")
    text = "".join(page.locator(".assistant span:not(.figures)").all_text_contents())
    assert text == answer.texts[0]
    assert page.locator(".assistant .draft").count() == answer.counts["accepted"]
    page.context.close()
    assert visit.errors == []
