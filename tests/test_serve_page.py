"""The page of the service: what it sends without a browser, and what it does in one."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from tests.browser import HOSTILE, Visit
from tests.service import MODEL, Running, chat, events, save_small, serving, target, until
from tests.test_serve_learning import ask, learning, prompts
from tests.tiny import BOS_ID, tiny_target

BEGINNING = "The dog ran. The cat ran. "
ANSWER = f"{BEGINNING}The dog ran. {HOSTILE} {HOSTILE}"


class Scripted:
    """A processor that lets the target answer every prompt with ANSWER, over and over. If
    `release` is not set, the decode waits for it behind BEGINNING."""

    def __init__(self, tokenizer: Any) -> None:
        self.release = threading.Event()
        self.release.set()
        self._header = len(tokenizer("assistant\n").input_ids)
        self._tokens = tokenizer(ANSWER).input_ids
        self._pause = len(tokenizer(BEGINNING).input_ids)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        for row, ids in enumerate(input_ids.tolist()):
            place = ids[::-1].index(BOS_ID) - self._header
            if place >= self._pause + 4:  # deeper than a draft
                self.release.wait(60)
            forced[row, self._tokens[place % len(self._tokens)]] = 0.0
        return forced


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    with serving(target()) as running:
        running.batcher.decoder.processors.append(Scripted(running.service.tokenizer))
        yield running


def test_files_and_figures_without_a_browser(service: Running) -> None:
    with service.client() as client:
        for path, kind in (
            ("/", "text/html"),
            ("/page.js", "text/javascript"),
            ("/page.css", "text/css"),
            ("/favicon.svg", "image/svg+xml"),
        ):
            answer = client.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(kind)
            assert answer.headers["x-content-type-options"] == "nosniff"
            policy = answer.headers["content-security-policy"]
            assert "default-src 'self'" in policy
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert " style=" not in answer.text
            assert "innerHTML" not in answer.text

        def figures() -> dict[str, float]:
            with client.stream("GET", "/live") as stream:
                line = next(x for x in stream.iter_lines() if x.startswith("data: "))
            return dict(events(iter([line]))[0])

        before = figures()
        answer = client.post("/v1/chat/completions", json=chat("a", max_tokens=40)).json()
        service.until_idle()
        after = figures()
        counts = answer["draftsmith"]
        assert after["generated"] - before["generated"] == 40
        for name in ("steps", "drafted", "accepted"):
            assert after[name] - before[name] == counts[name], name
        assert after["emitted"] - before["emitted"] == 39  # the prefill gives the first token
        reached = after["reached"] - before["reached"]
        assert max(counts["accepted"], 1) <= reached <= counts["drafted"]
        gamma = service.batcher.decoder.policy.max_depth
        assert (after["running"], after["waiting"], after["gamma"]) == (0, 0, gamma)
        changeable = client.get("/admin/settings").json()["changeable"]
        assert changeable["gamma"] == {"type": "integer", "minimum": 1}
        assert "heuristic" in changeable["policy"]["examples"]


def test_an_answer_streams_in_with_its_origins_and_stays_text(
    service: Running, browser: Any
) -> None:
    scripted: Any = service.batcher.decoder.processors[0]
    visit = Visit(browser, service.url)
    page = visit.page
    page.wait_for_selector(f"#model:text-is('{MODEL}')")
    scripted.release.clear()
    try:
        page.fill("#max-tokens", "200")
        visit.ask(HOSTILE)
        answer = page.locator(".assistant")
        page.wait_for_selector(f".assistant:has-text('{BEGINNING[:12]}')")
        assert page.is_enabled("#stop")
        assert HOSTILE not in answer.text_content()
    finally:
        scripted.release.set()
    visit.until_answered()
    text = "".join(answer.locator("span:not(.figures)").all_text_contents())
    assert HOSTILE in text
    assert (ANSWER * 9).startswith(text)
    assert page.locator(".user").text_content() == HOSTILE
    assert page.evaluate("window.hit") is None
    assert page.locator("#chat img, #chat script").count() == 0

    # Its colours and its hover texts are those of the trace.
    drafted = "".join(answer.locator(".draft").all_text_contents())
    last = service.texts()[-1]
    assert page.locator(".assistant .draft").count() == last.accepted
    assert drafted
    draft_colour, target_colour = (
        page.eval_on_selector(f".assistant .{kind}", "x => getComputedStyle(x).backgroundColor")
        for kind in ("draft", "target")
    )
    assert draft_colour != target_colour
    titles = [x.get_attribute("title") for x in answer.locator(".replaced").all()]
    assert titles
    assert all(title.startswith('rejected: "') for title in titles)

    page.wait_for_selector("#plots figure:nth-child(3) path[d*=L]", state="attached")
    assert page.locator("figcaption", has_text="learning").count() == 0
    page.context.close()
    assert visit.errors == []
    assert visit.hosts == {urlsplit(service.url).netloc}


def test_controls_change_the_settings_of_the_engine(service: Running, browser: Any) -> None:
    visit = Visit(browser, service.url)
    page = visit.page
    page.fill("#setting-gamma", "5")
    page.press("#setting-gamma", "Tab")
    until(lambda: service.batcher.decoder.policy.max_depth == 5)
    page.fill("#setting-policy", "heuristic:first=2")
    page.press("#setting-policy", "Tab")
    until(lambda: service.service.settings.to_dict()["policy"] == "heuristic:first=2")
    page.fill("#setting-policy", "nothing")
    page.press("#setting-policy", "Tab")
    page.wait_for_selector("#problem:has-text('nothing')")
    until(lambda: page.input_value("#setting-policy") == "heuristic:first=2")
    assert service.batcher.decoder.policy.max_depth == 5
    assert page.input_value("#setting-drafter") == "ngram"
    page.fill("#setting-lenience", "0.5")
    until(lambda: service.service.settings.lenience == 0.5)
    until(lambda: page.text_content("label[for=setting-lenience]") == "lenience 0.5")
    page.fill("#setting-lenience", "1")
    until(lambda: service.service.settings.lossy is None)
    page.context.close()


def test_a_service_that_learns_plots_its_versions_and_rounds(
    browser: Any, endless: Any, tmp_path: Path
) -> None:
    with learning(endless, save_small(tmp_path / "small")) as running:
        visit = Visit(browser, running.url)
        page = visit.page

        def newest(title: str) -> str | None:
            return page.text_content(f"#plots figure:has-text('{title}') output")

        page.wait_for_selector("#plots figure:has-text('learning rounds')")
        assert newest("drafter version") == "0"
        while (version := running.metrics()["draftsmith:drafter_version"]) == 0:
            ask(running, prompts(4), store=True)
        until(lambda: int(newest("drafter version") or 0) >= version)
        assert int(newest("learning rounds") or 0) >= version
        for title in ("drafter version", "learning rounds"):
            path = page.get_attribute(f"#plots figure:has-text('{title}') path", "d")
            assert len({step.split()[1] for step in path.split("L")}) > 1  # not a flat line
        page.context.close()
        assert visit.errors == []


def test_the_page_asks_for_the_key_and_keeps_it_in_memory(browser: Any) -> None:
    with serving(tiny_target(), api_key="secret") as running:
        with running.client() as client:
            assert client.get("/").status_code == 200
            for path in ("/live", "/admin/settings", "/admin/settings/"):
                assert client.get(path).status_code == 401, path
        visit = Visit(browser, running.url)
        page = visit.page
        for tried in ("wrong", "secret"):
            page.wait_for_selector("#key-dialog[open]")
            page.fill("#key", tried)
            with page.expect_response("**/v1/models") as answer:
                page.press("#key", "Enter")
            assert answer.value.status == (401 if tried == "wrong" else 200)
        page.wait_for_selector(f"#model:text-is('{MODEL}')")
        page.wait_for_selector("#plots figure")
        stored = "[localStorage.length, sessionStorage.length, document.cookie, location.href]"
        assert page.evaluate(stored) == [0, 0, "", f"{running.url}/"]
        page.fill("#max-tokens", "8")
        visit.ask("Hello")
        page.wait_for_selector(".assistant .figures")
        page.reload()
        page.wait_for_selector("#key-dialog[open]")
        page.context.close()
