"""`draftsmith watch`: a run's files, the state read from them, and the page in a browser."""

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from decode.base.errors import UserError
from draftsmith.cli.main import app
from draftsmith.net.listen import bind
from draftsmith.watch.run_state import LOG_LINES, POINTS, RunState
from draftsmith.watch.watch_server import HOST, WatchServer
from tests.browser import HOSTILE, Visit
from train.base.console import Reporter
from train.base.tracking.curve_file import CURVES_FILE


class WrittenRun:
    """A run's directory, written bit by bit, as `train.run.run` writes it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        stages = [{"name": "text", "kind": "generate"}, {"name": "heads", "kind": "heads"}]
        self.put("config.json", {"name": "trial", "target": {"model": "tiny"}, "stages": stages})
        (directory / "logs").mkdir()
        self.reporter = Reporter(silent=True)
        self.reporter.follow(directory / "logs")

    def put(self, path: str, value: Any) -> None:
        file = self.directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(value), "utf-8")

    def log(self, step: int, stage: str = "heads", **figures: float) -> None:
        named = {name.replace("__", "/"): value for name, value in figures.items()}
        self.reporter.log_figures(stage, step, named)

    def end_stage(self, index: int, name: str) -> None:
        summary = {"seconds": 61.0, "peak_memory_bytes": 3 * 2**30}
        self.put(f"stages/{index:02d}-{name}/done.json", {"summary": summary})

    def evaluate(self, acceptance: float) -> None:
        figures = {"acceptance_rate": acceptance, "tokens_per_step": 1.5, "lossless": True}
        figures["alone"] = False  # other processes were busy
        speedup = {"value": 1.2, "low": 1.1, "high": 1.3}
        row = {"stage": "heads", "drafter": "eagle1", "evaluation": {**figures, "speedup": speedup}}
        self.put("evaluations/01-heads/evaluation.json", row)


def test_a_log_says_the_minutes_that_are_left(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.base.console.LOG_EVERY_SECONDS", -1.0)
    with run.reporter.bar("answering", 40) as bar:
        for done, seconds in ((0, 0), (10, 60), (30, 180), (40, 240)):
            monkeypatch.setattr("train.base.console.time.time", lambda now=seconds: 1e9 + now)
            bar.update(done, "8 tokens/s")
    monkeypatch.undo()
    lines = RunState(run.directory).read()["log"]
    assert [line.partition("  ")[2].strip() for line in lines] == [
        "answering: 0/40 8 tokens/s",
        "answering: 10/40 8 tokens/s, 3 min left",
        "answering: 30/40 8 tokens/s, 1 min left",
        "answering: 40/40 8 tokens/s",
    ]


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    return WrittenRun(tmp_path / "run")


def test_the_state_follows_the_files(run: WrittenRun) -> None:
    state = RunState(run.directory)
    first = state.read()
    assert first["stages"][0] == {
        "name": "text",
        "kind": "generate",
        "state": "waiting",
        "seconds": None,
        "peak_memory_bytes": None,
    }
    assert (first["progress"], first["curves"], first["log"]) == (None, [], [])

    run.end_stage(0, "text")
    (run.directory / "stages/01-heads").mkdir()
    run.reporter.say("stage heads (heads)")
    with run.reporter.bar("training", 10) as bar:
        bar.update(0)
        time.sleep(0.02)
        bar.update(10, "loss 0.5")
    run.log(5, loss=2.0, dev__head1__top1=0.4, lr=1.0)
    run.log(5, "other", loss=9.0)
    run.log(10, loss=1.0, tokens_per_second=7.0, memory_gib=float("nan"))
    second = state.read()
    assert [stage["state"] for stage in second["stages"]] == ["done", "begun"]
    assert second["stages"][0]["seconds"] == 61.0
    progress = second["progress"]
    assert (progress["what"], progress["done"], progress["total"]) == ("training", 10, 10)
    assert progress["note"] == "loss 0.5"
    assert progress["seconds_left"] == 0
    assert 0 <= progress["age"] < 60
    assert [(c["stage"], c["figure"], list(c["lines"])) for c in second["curves"]] == [
        ("heads", "loss", ["loss"]),
        ("heads", "agreement", ["dev/head1/top1"]),
        ("heads", "tokens/s", ["tokens_per_second"]),
    ]
    assert second["curves"][0]["lines"]["loss"] == [(5, 2.0), (10, 1.0)]
    assert any(line.endswith(" stage heads (heads)") for line in second["log"])

    # A second start goes on after step 5, from a line that the first left incomplete.
    curves = run.directory / "logs" / CURVES_FILE
    with curves.open("a", encoding="utf-8") as file:
        file.write('{"stage": "heads", "step": 15')
    assert state.read()["curves"] == second["curves"]
    run.reporter.follow(run.directory / "logs")
    run.reporter.continue_figures("heads", 5)
    run.log(6, loss=0.5)
    for number in range(2 * LOG_LINES):
        run.reporter.say(f"line {number}")
    run.end_stage(1, "heads")
    run.evaluate(0.6)
    third = state.read()
    assert third["curves"][0]["lines"]["loss"] == [(5, 2.0), (6, 0.5)]
    assert RunState(run.directory).read()["curves"] == third["curves"]
    assert len(third["log"]) == LOG_LINES
    assert third["evaluations"][0]["acceptance_rate"] == 0.6
    assert not third["finished"]  # the report is not written yet
    run.put("report.json", {})
    assert state.read()["finished"]


def test_reading_changes_nothing_and_half_written_files_are_passed_over(run: WrittenRun) -> None:
    run.log(5, loss=2.0)
    (run.directory / "evaluations/00-x").mkdir(parents=True)
    (run.directory / "evaluations/00-x/evaluation.json").write_text('{"stage": "he', "utf-8")
    (run.directory / "logs/progress.json").write_text("", "utf-8")
    before = {p: p.stat().st_mtime_ns for p in run.directory.rglob("*")}
    state = RunState(run.directory).read()
    assert state["evaluations"] == []
    assert state["progress"] is None
    assert before == {p: p.stat().st_mtime_ns for p in run.directory.rglob("*")}


def test_long_curves_are_thinned_and_keep_their_end(run: WrittenRun) -> None:
    state = RunState(run.directory)
    for step in range(10 * POINTS + 7):
        run.log(step, loss=step)
    line = state.read()["curves"][0]["lines"]["loss"]
    assert len(line) <= POINTS
    assert line[-1] == (10 * POINTS + 6, 10.0 * POINTS + 6)
    assert line == sorted(line)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        RunState(tmp_path)
    result = CliRunner().invoke(app, ["watch", str(tmp_path)])
    assert result.exit_code == 2
    assert "expected the directory of a run" in result.output


@pytest.fixture
def address(run: WrittenRun) -> Iterator[str]:
    started = threading.Event()
    with bind(HOST, 0) as bound:
        server = WatchServer(RunState(run.directory), started.set)
        thread = threading.Thread(target=lambda: server.run(sockets=[bound]), daemon=True)
        thread.start()
        assert started.wait(30)
        yield f"{HOST}:{bound.getsockname()[1]}"
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def ask(address: str, method: str, path: str, **headers: str) -> tuple[int, str, str]:
    """Status, content security policy, and the text; of a stream only its first line."""
    connection = http.client.HTTPConnection(address, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        policy = str(answer.headers["content-security-policy"])
        with contextlib.closing(answer):
            text = answer.readline() if path == "/live" else answer.read()
        return answer.status, policy, text.decode()


def test_the_server_sends_its_files_to_this_machine_only(run: WrittenRun, address: str) -> None:
    for path in ("/", "/page.js", "/page.css", "/live"):
        status, policy, text = ask(address, "GET", path)
        assert status == 200
        assert "default-src 'self'" in policy
        assert "innerHTML" not in text
        assert " style=" not in text
        if path == "/live":
            assert json.loads(text.removeprefix("data: "))["name"] == "trial"
        assert ask(address, "POST", path)[0] == 405
        for elsewhere in ({"Host": "elsewhere.example"}, {"Origin": "https://elsewhere.example"}):
            assert ask(address, "GET", path, **elsewhere)[0] == 403
    assert ask(address, "GET", "/../config.json")[0] == 404


def test_the_page_follows_the_run(run: WrittenRun, address: str, browser: Any) -> None:
    run.end_stage(0, "text")
    (run.directory / "stages/01-heads").mkdir()
    run.log(5, loss=2.0)
    visit = Visit(browser, f"http://{address}/")
    page = visit.page
    page.wait_for_selector("#stages li.done:has-text('text (generate): done, 1 min 1 s')")
    page.wait_for_selector("#stages li.begun:has-text('heads')")
    page.wait_for_selector("#what:has-text('stage 2 of 2, heads')")
    # One point is a dot, with its step and its value.
    page.wait_for_selector("#curves path.dot", state="attached")
    assert page.text_content("#curves .plot") == "2step 5"
    with run.reporter.bar("training", 100) as bar:
        bar.update(0)
        time.sleep(1.1)
        bar.update(50, HOSTILE)
    run.reporter.say(HOSTILE)
    run.log(10, loss=1.25)
    run.evaluate(0.63)
    page.wait_for_selector("#what:has-text('training: 50 of 100')")
    assert "left of this" in page.text_content("#what")
    page.wait_for_selector("#evaluations td:has-text('0.63')")
    page.wait_for_selector("#evaluations td:has-text('1.20× [1.10, 1.30]*')")
    assert page.is_visible("#disturbed")
    page.wait_for_selector("#curves .key:has-text('loss 1.25')")
    page.wait_for_selector("#curves path[d*=L]", state="attached")
    assert HOSTILE in page.text_content("#log")
    assert page.text_content("#note") == HOSTILE
    assert page.evaluate("window.hit") is None
    run.end_stage(1, "heads")
    run.put("report.json", {})
    page.wait_for_selector("#what:has-text('finished')")
    page.context.close()
    assert visit.errors == []
    assert visit.hosts == {address}
