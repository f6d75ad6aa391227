"""The second half of a cycle, with engines that go away: requests are answered in the end, and the
learner knows which drafter answers them."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from decode.base.errors import UserError
from draftsmith.learn.cycle import TenantLearner
from draftsmith.learn.learn_config import read_learn_config
from draftsmith.learn.learn_state import CycleOutcome, LearnState, Swap
from draftsmith.learn.swap import EngineProcesses, RecorderSwitch
from tests.training import Lines
from tests.upstream import ADMIN_KEY, FakeEngine, recorded, served
from train.engines.child_process import NoAnswer

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "What is a drafter?"}]}
LEARN = """
records: records
directory: learning
run: run.yaml
drafter: drafter
form: hf
recorder: {key_env: UNUSED}
engine: {command: ["false"], drain_seconds: 5}
trigger: {window: 80}
watch: {drafted: 160, seconds: 60, silent_seconds: 0.05, tolerance: 0.05}
poll_seconds: 0.01
"""


class FakeEngines(EngineProcesses):
    """Engines that answer as told. dead: versions that end after their start. refused: those that
    do not start."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.running: dict[str, contextlib.ExitStack] = {}
        self.started: list[str] = []
        self.dead: set[str] = set()
        self.refused: set[str] = set()

    def start(self, directory: Path, export: Path) -> str:
        name = directory.name
        self.stop(directory)
        if name in self.refused:
            raise UserError("out of memory")
        self.started.append(name)
        mine = self._stack.enter_context(contextlib.ExitStack())
        url = mine.enter_context(served(FakeEngine(name).app()))
        self.running[name] = mine
        if name in self.dead:
            self.kill(name)
        return url

    def stop(self, directory: Path) -> bool:
        return self.kill(directory.name)

    def kill(self, name: str) -> bool:
        stack = self.running.pop(name, None)
        if stack is not None:
            stack.close()
        return stack is not None


class Swapping:
    """A cycle at the step `start`: version 1 is trained and exported, the first drafter serves."""

    def __init__(self, base: Path, stack: contextlib.ExitStack) -> None:
        (base / "learn.yaml").write_text(LEARN, "utf-8")
        self.config = read_learn_config(base / "learn.yaml")
        work = base / "learning/versions/1/work"
        work.mkdir(parents=True)
        (work / "held_out.jsonl").write_text(
            json.dumps(CHAT | {"messages": CHAT["messages"] * 2}), "utf-8"
        )
        cycle = CycleOutcome(version=1, kept=False, reason="", records=8, held_out=1)
        swap = Swap(old=0, new=1)
        LearnState(step="start", versions=1, cycle=cycle, swap=swap).save(base / "learning")
        self.engines = FakeEngines(stack)
        self.first = self.engines.start(base / "learning/versions/0", base)
        self.client = stack.enter_context(recorded(self.first, base / "recorded"))
        self.recorder = RecorderSwitch(str(self.client.base_url), ADMIN_KEY)
        self.reporter = Lines()

    def learner(self, sleep: Callable[[float], Any] | None = None) -> TenantLearner:
        return TenantLearner(
            self.config,
            self.engines,
            self.recorder,
            self.reporter,
            lambda settings: Accelerator(cpu=True),
            sleep=sleep or self.traffic,
        )

    def traffic(self, seconds: float = 0) -> int:
        return int(self.client.post("/v1/chat/completions", json=CHAT).status_code)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Swapping]:
    with contextlib.ExitStack() as stack:
        yield Swapping(tmp_path, stack)


@pytest.mark.parametrize(
    ("step", "who", "reason", "serving"),
    [
        ("start", "0", "kept; too little", 1),
        ("switch", "0", "kept; too little", 1),
        ("switch", "1", "kept: 0.500 in the engine after 0.500", 1),
        ("drain", "0", "kept: 0.500 in the engine after 0.500", 1),
        ("watch", "1", "rolled back: .* does not answer", 0),
    ],
)
def test_an_engine_dies_before_a_step(
    site: Swapping, step: str, who: str, reason: str, serving: int
) -> None:
    site.traffic()
    learner = site.learner()
    learner.state.window.add(learner._counters(site.first), 80)
    for _ in range(2):
        site.traffic()
    while learner.state.step != step:
        learner.step()
    assert site.engines.kill(who)
    outcome = learner.once()
    assert outcome is not None
    assert outcome.reason.startswith(reason.partition(".*")[0])
    assert reason.rpartition(".*")[2] in outcome.reason
    assert outcome.kept == (serving == 1)
    assert learner.state.serving == serving
    assert list(site.engines.running) == [str(serving)]
    assert site.client.get("/health").text == str(serving)
    assert site.traffic() == 200


@pytest.mark.parametrize("again", [False, True])
def test_a_new_engine_that_always_dies_is_given_up(
    site: Swapping, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """At its first request, or each time behind its trial."""
    site.engines.dead = {"1"}
    if again:
        monkeypatch.setattr(TenantLearner, "_require_acceptance", lambda learner, url: None)
    outcome = site.learner().once()
    assert outcome is not None
    assert not outcome.kept
    assert ("ended 3 times" if again else "was not taken") in outcome.reason
    assert site.engines.started.count("1") == (3 if again else 1)
    assert site.client.get("/health").text == "0"


def test_the_engine_before_does_not_come_back_at_once(site: Swapping) -> None:
    learner = site.learner()
    while learner.state.step != "watch":
        learner.step()
    site.engines.kill("1")
    site.engines.refused = {"0"}
    with pytest.raises(NoAnswer, match="out of memory"):
        learner.once()
    site.engines.refused = set()
    outcome = site.learner().once()
    assert outcome is not None
    assert outcome.reason.startswith("rolled back")
    assert site.client.get("/health").text == "0"


class Ended(BaseException):
    """Ends a learner that follows."""


def test_a_learner_that_follows_waits_for_an_engine_that_restarts(site: Swapping) -> None:
    LearnState().save(Path(site.config.directory))
    port = int(site.first.rpartition(":")[2])
    site.engines.kill("0")
    with contextlib.ExitStack() as stack:
        looks = 0

        def look(seconds: float) -> None:
            nonlocal looks
            looks += 1
            if looks == 3:
                stack.enter_context(served(FakeEngine(rate=0.25).app(), port))
            if looks > 3:
                assert site.traffic() == 200
            if looks == 9:
                raise Ended

        with pytest.raises(Ended):
            site.learner(look).follow()
    with pytest.raises(NoAnswer):  # nobody waits for an address that is wrong from the start
        TenantLearner(
            site.config,
            site.engines,
            RecorderSwitch("http://127.0.0.1:9", ADMIN_KEY),
            site.reporter,
            lambda settings: Accelerator(cpu=True),
        ).follow()
    silent = [line for line in site.reporter.lines if "asked again" in line]
    assert len(silent) == 1
    assert LearnState.load(Path(site.config.directory)).window.first == 0.25
