"""Learning beside an engine, with small models, a recorder, and services as engines."""

import contextlib
import functools
import itertools
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import transformers
from accelerate import Accelerator

from decode.base.errors import UserError
from decode.loop.decoding import Decoder
from decode.model.loading import Target, load_target
from decode.opening.directory import open_drafter
from decode.text import prompt_ids
from decode.text_stream import decode
from draftsmith.export import ExportOptions, export_directory
from draftsmith.export.engine_kinds import EngineTask
from draftsmith.export.export_directory import check_export, export_drafter
from draftsmith.learn import cycle
from draftsmith.learn.cycle import TenantLearner, require_ready
from draftsmith.learn.learn_config import EngineConfig, read_learn_config
from draftsmith.learn.learn_state import BestSoFar, CycleOutcome, LearnState, RateWindow
from draftsmith.learn.record.kept_answers import Exchange
from draftsmith.learn.record.records import LEARNT_FILE, Records, make_record
from draftsmith.learn.swap import EngineProcesses, RecorderSwitch
from draftsmith.learn.training_run import FEWEST_PROMPTS, Gain, TrainingRun, split_by_time, usable
from heads.heads_directory import read_heads
from tests.export import SHAPE, make_heads, needs
from tests.service import serving
from tests.tiny import EOS_ID, save_small_lm, save_tiny, with_noise
from tests.training import Killed
from tests.upstream import ADMIN_KEY, read_until, recorded
from train.base.console import Reporter
from train.engines.child_process import ask, environment_of
from train.engines.counters import DraftCounts, parse_counters, read_counters, served_models
from train.run import run

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

WORDS = ["the", "a", "dog", "fox", "sea", "shell", "target", "drafter", "token", "sells", "jumps"]
HEAD = """
name: replaced
trackers: []
threads: 1
target: {{model: {base}/target, dtype: float32, device: cpu}}
data: {{train: replaced, test: replaced}}
stages:
"""
RUN = (
    HEAD
    + """\
  - name: distill
    kind: distill
    text: data
    drafter: {{model: "{{serving}}"}}
    loop: {{epochs: 99, max_steps: 60, tokens_per_batch: 512, save_every: 20}}
    optimizer: {{lr: 3e-3, warmup_steps: 5}}
"""
)
LEARN = """
records: records/a
directory: learning
run: run.yaml
drafter: drafter
form: hf
gamma: 3
trigger: {records: 20, window: 100}
held_out: 8
max_new_tokens: 16
recorder: {key_env: UNUSED}
engine: {command: ["false"], drain_seconds: 5}
watch: {drafted: 300, seconds: 60, tolerance: 0.05}
poll_seconds: 0.01
"""

ENGINE_KEY = "engine"


class Kills:
    """Kills a learner before each thing that a step does to files, engines, recorder or target. The
    first attempt at a step ends before the first of them, the second one before the second, and so
    on up to MOST; then one ends before the state is saved, and the next one goes through."""

    MOST = 6
    EFFECTS: tuple[tuple[Any, str], ...] = (
        (LearnState, "save"),
        (RecorderSwitch, "switch"),
        (RecorderSwitch, "drain"),
        (TrainingRun, "write"),
        (TrainingRun, "train"),
        (TrainingRun, "drafts"),
        (shutil, "rmtree"),
        *((cycle, name) for name in ("write_file", "read_counters", "smoke_counts")),
        (cycle, "export_drafter"),
    )

    def __init__(self, patch: pytest.MonkeyPatch, *engines: tuple[Any, str]) -> None:
        self.attempt = self.count = 0
        for owner, name in (*self.EFFECTS, *engines):
            patch.setattr(owner, name, self._deadly(getattr(owner, name), name))

    def _deadly(self, effect: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(effect)
        def deadly(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            last = name == "save" and self.attempt == self.MOST + 1
            if self.count == self.attempt <= self.MOST or last:
                raise Killed
            return effect(*arguments, **options)

        return deadly

    def run(self, learner: Callable[[], TenantLearner]) -> dict[str, int]:
        """Do a cycle, each attempt by a new learner. Returns how often each step was killed."""
        kills: dict[str, int] = {}
        while not (now := learner()).state.history:
            swap = now.state.swap
            step = f"{now.state.step}{' back' if swap and swap.back else ''}"
            self.attempt = kills.setdefault(step, 0) + 1
            self.count = 0
            with contextlib.suppress(Killed):
                now.step()
                continue
            kills[step] += 1
        return kills


def noisy(path: Path, target: Target, noise: float) -> Path:
    """A drafter directory: the target with noise on its weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained(target.name)
    return save_small_lm(path, with_noise(model, noise), target)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A target, a drafter of it that is often wrong, and records of the target's answers."""
    target = load_target(str(save_tiny(tmp_path / "target", "llama", layers=2)))
    noisy(tmp_path / "drafter", target, 0.3)
    (tmp_path / "run.yaml").write_text(RUN.format(base=tmp_path), "utf-8")
    (tmp_path / "learn.yaml").write_text(LEARN, "utf-8")
    generator = torch.Generator().manual_seed(0)
    decoder = Decoder(target.model, open_drafter("ngram", target), gamma=2)
    prompts = [
        " ".join(WORDS[i] for i in torch.randint(len(WORDS), (5,), generator=generator).tolist())
        for _ in range(40)
    ]
    messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
    answers = decoder.decode([prompt_ids(m, target.tokenizer) for m in messages], 24).outputs
    records = Records(tmp_path / "records" / "a")
    for i, (asked, tokens) in enumerate(zip(messages, answers, strict=True)):
        text = decode(target.tokenizer, tokens)
        records.append(make_record(Exchange(f"r{i}", target.name, asked, text), None, 1000.0 + i))
    return tmp_path


class Services(EngineProcesses):
    """Services in this process as engines. drafters: what serves in place of an export."""

    def __init__(self, target: Target, stack: contextlib.ExitStack) -> None:
        self.target, self._stack = target, stack
        self.running: dict[Path, contextlib.ExitStack] = {}
        self.drafters: dict[str, str] = {}

    def start(self, directory: Path, export: Path) -> str:
        self.stop(directory)
        assert (export / "export.json").exists()
        spec = self.drafters.get(directory.name, str(export))
        mine = self._stack.enter_context(contextlib.ExitStack())
        drafter = open_drafter(spec, self.target)
        service = mine.enter_context(serving(self.target, drafter, api_key=ENGINE_KEY))
        self.running[directory] = mine
        return service.url

    def stop(self, directory: Path) -> bool:
        stack = self.running.pop(directory, None)
        if stack is not None:
            stack.close()
        return stack is not None


class Site:
    """A recorder before a first engine, with traffic whenever a learner waits."""

    def __init__(self, base: Path, stack: contextlib.ExitStack) -> None:
        self.base = base
        self.config = read_learn_config(base / "learn.yaml")
        self.target = load_target(str(base / "target"))
        self.engines = Services(self.target, stack)
        drafter = open_drafter(str(base / "drafter"), self.target)
        first = stack.enter_context(serving(self.target, drafter, api_key=ENGINE_KEY))
        self.first = first.url
        self.client = stack.enter_context(recorded(first.url, base / "proxied"))
        self.client.headers["authorization"] = f"Bearer {ENGINE_KEY}"
        self.recorder = RecorderSwitch(str(self.client.base_url), ADMIN_KEY)
        self.sent = 0

    def learner(self, **changes: Any) -> TenantLearner:
        return TenantLearner(
            self.config.model_copy(update=changes),
            self.engines,
            self.recorder,
            Reporter(silent=True),
            lambda settings: Accelerator(cpu=True),
            engine_key=ENGINE_KEY,
            sleep=self.traffic,
        )

    def traffic(self, seconds: float = 0, **fields: Any) -> None:
        self.sent += 1
        text = " ".join(WORDS[(self.sent * step) % len(WORDS)] for step in (1, 3, 5, 7))
        messages = [{"role": "user", "content": text}]
        body = {"model": self.target.name, "messages": messages, "max_tokens": 24} | fields
        answer = self.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text


@pytest.fixture
def site(base: Path) -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        yield Site(base, stack)


def test_a_better_drafter_is_trained_and_swapped_in(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine is also asked to verify it. The target is loaded once for all of this."""
    exports, loads = [], []

    def loaded(*given: Any, **options: Any) -> Target:
        loads.append(given)
        return load_target(*given, **options)

    for module in (run, export_directory):
        monkeypatch.setattr(module, "load_target", loaded)

    def verified(engine: str, task: EngineTask) -> Any:
        exports.append((engine, check_export(task.export)["layout"], task.gamma))
        assert len(task.prompts) == 8
        assert task.target is learner._target
        return SimpleNamespace(failures=[])

    monkeypatch.setattr(cycle, "verify_export", verified)
    monkeypatch.setattr(cycle, "engine_for_drafter", lambda *_: None)
    for _ in range(8):
        site.traffic()
    learner = site.learner(verify="vllm")
    assert "40 new" in "\n".join(learner.describe())
    assert json.loads(json.dumps(learner.figures()))["new_records"] == 40
    assert learner._due()
    site.traffic()
    learner.once()
    assert exports == [("vllm", "hf", 3)]
    assert len(loads) == 1
    (outcome,) = learner.state.history
    assert outcome.kept, outcome.reason
    assert (outcome.records, outcome.held_out) == (32, 8)
    assert outcome.serving is not None
    assert outcome.candidate is not None
    assert outcome.candidate > outcome.serving
    assert outcome.before is not None
    assert outcome.after is not None
    assert outcome.after > outcome.before - 0.05
    state = LearnState.load(learner.directory)
    assert (state.serving, state.step, state.newest) == (1, "wait", 1039.0)
    version = learner.directory / "versions/1"
    assert site.recorder.serving != site.first
    assert list(site.engines.running) == [version]
    # No copy of a record is left, only the ids.
    assert not (version / "work").exists()
    assert len(json.loads((version / LEARNT_FILE).read_text("utf-8"))) == 40
    assert learner.once() is None  # nothing is new


def test_a_worse_drafter_is_rolled_back(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is better on the held-out records, and worse on the traffic: another drafter stands for
    it in its engine. Learners are killed all the way."""
    site.engines.drafters["1"] = str(noisy(site.base / "worse", site.target, 0.6))
    LearnState(window=RateWindow(first=0.5, newest=0.5)).save(Path(site.config.directory))
    kills = Kills(monkeypatch, (Services, "start"), (Services, "stop")).run(site.learner)
    steps = ["wait", "collect", "train", "judge", "export", "start", "switch", "drain", "watch"]
    assert list(kills) == [*steps, "start back", "switch back", "drain back"]
    assert min(count for step, count in kills.items() if step != "wait") >= 3
    learner = site.learner()
    (outcome,) = learner.state.history
    assert not outcome.kept
    assert outcome.reason.startswith("rolled back")
    assert outcome.after is not None
    assert outcome.before is not None
    assert outcome.after < outcome.before - 0.05
    assert learner.state.serving == 0
    assert list(site.engines.running) == [learner.directory / "versions/0"]
    assert site.recorder.serving != site.first


def test_an_engine_that_ignores_its_drafter_answers_nobody(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.engines.drafters["1"] = "none"
    monkeypatch.setattr("train.engines.counters.LONGEST_SETTLE", 0.5)
    outcome = site.learner().once()
    assert outcome is not None
    assert "accepted none" in outcome.reason
    assert site.recorder.serving == site.first
    assert not site.engines.running


@pytest.mark.parametrize("verified", [pytest.param(True, marks=pytest.mark.thorough), False])
def test_a_drafter_that_is_not_better_or_not_used_is_left(
    site: Site, monkeypatch: pytest.MonkeyPatch, verified: bool
) -> None:
    if not verified:
        failures = SimpleNamespace(failures=["it ignored the drafter"])
        monkeypatch.setattr(cycle, "verify_export", lambda engine, task: failures)
        monkeypatch.setattr(cycle, "engine_for_drafter", lambda *_: None)
    outcome = site.learner(**({"min_gain": 0.9} if verified else {"verify": "vllm"})).once()
    assert outcome is not None
    reason = "not better" if verified else "the engine does not use it: it ignored the drafter"
    assert outcome.reason.startswith(reason)
    assert site.recorder.serving == site.first
    assert not site.engines.running
    version = Path(site.config.directory) / "versions/1"
    assert [path.name for path in version.iterdir()] == [LEARNT_FILE]


# --- parts ----------------------------------------------------------------------------------------


def test_counters_of_engines() -> None:
    def counted(page: str) -> DraftCounts | None:
        counters = parse_counters(page)
        return counters and counters.counts

    page = """
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 1e1
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 9.0
"""
    assert counted(page) == DraftCounts(40, 12)
    assert counted(page.replace("vllm:", "llamacpp:")) == DraftCounts(40, 12)
    assert counted(page.replace('"m"', '"a } b"')) == DraftCounts(40, 12)
    assert parse_counters(page.replace(" 12.0", " 1e999")) is None  # no number to reckon with
    # 50 answers of 10 tokens after their first; 200 verifications of 4 nodes accept 300 tokens.
    page = """
sglang:generation_tokens_total{is_streaming="true"} 350.0
sglang:generation_tokens_total{is_streaming="false"} 200.0
sglang:num_requests_total{model_name="m"} 50.0
sglang:spec_verify_calls_total{model_name="m"} 200.0
sglang:spec_num_draft_tokens{tp_rank="0"} 4.0
sglang:spec_num_draft_tokens{tp_rank="1"} 4.0
sglang:spec_accept_length{tp_rank="0"} 2.1
"""
    assert counted(page) == DraftCounts(600, 300)
    assert parse_counters(page.replace("spec_verify_calls", "cached_tokens")) is None
    assert (DraftCounts(40, 12) - DraftCounts(30, 10)).rate == 0.2
    assert DraftCounts(5, 1) - DraftCounts(30, 10) == DraftCounts(5, 1)


def test_a_key_is_not_sent_on_to_another_address() -> None:
    paths = []

    class Away(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}/elsewhere")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Away) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        with pytest.raises(UserError, match="does not answer: HTTP Error 302"):
            ask(url, key=ENGINE_KEY)
        server.shutdown()
    assert paths == ["/metrics"]


def test_only_the_newest_versions_that_served_stay(site: Site) -> None:
    learner = site.learner()
    for version in range(1, 8):
        (learner.directory / f"versions/{version}/drafter").mkdir(parents=True)
        (learner.directory / f"versions/{version}/work").mkdir()
        learner.state.history.append(
            CycleOutcome(version=version, kept=version != 6, reason="", records=1, held_out=1)
        )
    learner.state.serving = 2
    learner._tidy()
    left = sorted(path.parent.name for path in learner.directory.glob("versions/*/*"))
    assert left == ["2", "4", "5", "7"]


def test_the_best_version_is_what_a_drop_is_measured_against() -> None:
    """Two losses of 0.03 are one of 0.06, whatever serves meanwhile."""
    state = LearnState()
    for version, accepted in ((0, 50), (1, 53), (2, 50), (3, 47)):
        state.serving, state.window = version, RateWindow()
        for drafted in (0, 100):
            state.read(DraftCounts(drafted, accepted * drafted / 100), 100)
    assert state.best == BestSoFar(version=1, rate=0.53)
    assert state.drop == pytest.approx(0.06)
    assert LearnState.model_validate_json(state.model_dump_json()) == state


def test_a_gain_is_certain_if_the_interval_of_all_prompts_says_so() -> None:
    random = np.random.default_rng(0)
    drafted = np.full(64, 60)

    def counts(rate: float) -> np.ndarray:
        rates = np.clip(rate + random.normal(0, 0.2, 64), 0, 1)
        return np.stack([drafted, (rates * drafted).astype(np.int64)], 1)

    before, after = counts(0.5), counts(0.51)
    same = Gain.of(before, before)
    assert (same.low, same.high, same.before) == (0, 0, same.after)
    slight = Gain.of(before, after)
    assert slight.low < slight.after - slight.before < slight.high
    assert slight.low < 0 < slight.high
    better = Gain.of(before, before + np.array([0, 3]))
    assert [better.low, better.high] == pytest.approx([3 / 60] * 2)
    nothing = np.zeros((64, 2), dtype=np.int64)  # a drafter that drafts nothing
    assert Gain.of(before, nothing).high < 0
    few = np.array([[60, 10]] * 5)  # one prompt, or a few, show nothing for certain
    assert (Gain.of(few, few * [1, 6]).low, Gain.of(few[:1], few[:1] * [1, 6]).low) == (-1, -1)
    # Without a difference, few of many judges see one.
    for some in (FEWEST_PROMPTS, 64):
        pairs = [(counts(0.5)[:some], counts(0.5)[:some]) for _ in range(200)]
        assert sum(Gain.of(*pair).low > 0 for pair in pairs) <= 12


def test_a_gain_that_may_be_chance_swaps_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 7 prompts the new drafter is a little worse, and on one much better: higher in sum."""
    drafts = {"drafter": [30] * 8, "work": [29] * 7 + [45]}

    def counted(run: TrainingRun, drafter: Path) -> np.ndarray:
        new = drafter.parent.name == "1"
        return np.array([[60, x] for x in drafts["work" if new else "drafter"]])

    monkeypatch.setattr(TrainingRun, "train", lambda run, result: result.mkdir())
    monkeypatch.setattr(TrainingRun, "drafts", counted)
    outcome = site.learner().once()
    assert outcome is not None
    assert outcome.candidate is not None
    assert outcome.serving is not None
    assert outcome.gain is not None
    assert outcome.candidate > outcome.serving
    assert outcome.gain[0] < 0 < outcome.gain[1]
    assert outcome.reason.startswith("not better for certain")


@pytest.mark.parametrize("rows", ["repeated", "deleted", "without samples"])
def test_no_rows_to_train_on_are_waited_for(
    site: Site, monkeypatch: pytest.MonkeyPatch, rows: str
) -> None:
    learner = site.learner()
    if rows == "repeated":
        records = learner._records.read()
        for record in records:
            record["messages"][:-1] = records[0]["messages"][:-1]
        monkeypatch.setattr(Records, "read", lambda self, after=0.0: records)
        assert learner.once() is None
        learner.state.step = "collect"  # as if it had been due before the records were deleted
        outcome = learner.once()
        assert outcome is not None
        assert outcome.reason.startswith("too few records: 0 are left to learn from")
    elif rows == "deleted":
        monkeypatch.setattr(Records, "read", lambda self, after=0.0: [])
        learner.state.step = "collect"
        outcome = learner.once()
        assert outcome is not None
        assert outcome.reason.startswith("too few records: 0 are left to learn from, and 0")
    else:
        run = site.base / "run.yaml"
        short = run.read_text("utf-8").replace("text: data", "text: data\n    max_length: 2")
        run.write_text(short, "utf-8")
        outcome = learner.once()
        assert outcome is not None
        assert outcome.reason.startswith("no sample to train on")
    assert not outcome.kept
    assert learner.state.step == "wait"
    if rows != "deleted":
        monkeypatch.undo()
    assert learner.once() is None  # nothing is new


def test_records_of_other_models_are_counted_and_not_learnt_from(site: Site) -> None:
    learner = site.learner()
    extra = Exchange("r", "an-adapter", [{"role": "user", "content": "hm"}], "yes")
    learner._records.append(make_record(extra, None, 2000.0))
    lines: list[str] = []
    learner.reporter = SimpleNamespace(say=lines.append)  # type: ignore[assignment]
    assert learner._due()
    assert learner.state.models == [site.target.name]
    found, left_out = learner._usable()
    assert len(found) == 40
    assert [*left_out.values()] == [1]
    assert "1 new records are not learnt from: they are of another model or an" in lines[0]
    assert learner.figures()["left_out"] == dict(left_out)
    assert any("1 records" in line for line in learner.describe())
    assert site.learner(model="an-adapter")._usable()[1].total() == 40


def test_adapters_are_no_names_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM and SGLang list them: with a parent."""
    listed = [{"id": "a"}, {"id": "b", "parent": None}, {"id": "lora", "parent": "a"}]
    for data, names in ((listed, ["a", "b"]), (listed[2:], None), ([], None), ("x", None)):
        page = json.dumps({"data": data}).encode()
        monkeypatch.setattr("train.engines.counters.ask", lambda *args, page=page, **more: page)
        if names is None:
            with pytest.raises(UserError, match="lists no model"):
                served_models("http://engine")
        else:
            assert served_models("http://engine") == names


def test_windows_see_a_restart() -> None:
    window = RateWindow()
    for drafted, accepted in ((50, 20), (149, 60), (150, 70), (250, 90), (350, 100)):
        window.add(DraftCounts(drafted, accepted), 100)
    assert (window.first, window.newest) == (0.5, 0.1)
    window.add(DraftCounts(10, 10), 100)
    assert (window.begin, window.newest) == (DraftCounts(10, 10), 0.1)


def test_traffic_that_changes_begins_a_cycle(site: Site) -> None:
    """The drafter is as flat as the target at a high temperature, and wrong at its first choice."""
    learner = site.learner(trigger=site.config.trigger.model_copy(update={"records": 1000}))
    window = learner.state.window
    assert not learner._due()
    while window.newest is None:
        site.traffic(temperature=2.0, seed=site.sent)
        assert not learner._due()
    assert window.newest > 0.15
    sent = site.sent
    while window.newest > 0.1 and site.sent < sent + 20:
        assert learner.once() is None
        site.traffic()
        window.add(learner._counters(site.first), 100)
    assert learner._due()
    learner.step()
    assert learner.state.step == "collect"
    learner.state.newest = 1039.0
    assert not learner._due()


def test_held_out_records_are_the_newest_and_no_copies() -> None:
    records = [
        make_record(Exchange("r", "m", [{"role": "user", "content": text}], answer), None, float(i))
        for i, (text, answer) in enumerate(
            (("a", "x"), ("b", "x"), ("c", "mail a@b.org"), ("a", "y"), ("d", "z"))
        )
    ]
    kept, left_out = usable(records, ["m"])
    assert left_out == {"a part of their answer was taken out": 1}
    assert [record["time"] for record in kept] == [0, 1, 3, 4]
    train, judged = split_by_time(kept, 2)
    assert ([r["time"] for r in train], [r["time"] for r in judged]) == ([1], [3, 4])


def test_mistakes_are_reported_before_anything_runs(base: Path) -> None:
    config = base / "learn.yaml"
    require_ready(read_learn_config(config))
    config.write_text(LEARN.replace("gamma: 3", "gama: 3"), "utf-8")
    with pytest.raises(UserError, match="gama"):
        read_learn_config(config)
    config.write_text(LEARN.replace("drafter: drafter", "drafter: elsewhere"), "utf-8")
    with pytest.raises(UserError, match="elsewhere"):
        require_ready(read_learn_config(config))


HEADS_RUN = (
    HEAD
    + """\
  - name: tune
    kind: heads
    text: data
    start: "{{serving}}"
    heads: {{type: medusa, heads: 2, output: shared}}
    loop: {{epochs: 99, max_steps: 4, tokens_per_batch: 512}}
    optimizer: {{lr: 1e-3}}
"""
)


def test_an_engine_that_does_not_read_the_export_is_refused_at_the_start(base: Path) -> None:
    config = read_learn_config(base / "learn.yaml").model_copy(update={"verify": "llama-server"})
    with pytest.raises(UserError, match="llama-server reads gguf"):
        require_ready(config)


def test_heads_continue_from_the_serving_drafter(base: Path) -> None:
    """A cycle trains them from where the serving ones are, not anew."""
    target = load_target(str(base / "target"))
    config = read_learn_config(base / "learn.yaml")
    (base / "run.yaml").write_text(HEADS_RUN.format(base=base), "utf-8")
    with pytest.raises(UserError, match=r"trains heads, but .* is a small_lm drafter"):
        require_ready(config)
    shutil.rmtree(base / "drafter")
    heads = {"type": "medusa", "heads": 2, "layers": 1, "output": "shared"}
    before = make_heads(base / "drafter", target, heads, moved=0.1)
    require_ready(config)
    records = Records(base / "records" / "a").read()
    work = base / "work"
    run = TrainingRun(
        config,
        work,
        base / "drafter",
        "version-1",
        Reporter(silent=True),
        lambda settings: Accelerator(cpu=True),
    )
    run.write(usable(records)[0])
    run.train(base / "trained")
    after = read_heads(base / "trained", target)
    for name, tensor in before.state_dict().items():
        change = (after.state_dict()[name] - tensor).abs().max()
        assert 0 < change < 0.02, name


SERVER = [sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1"]


def test_engine_processes_are_known_after_a_kill(tmp_path: Path) -> None:
    config = EngineConfig(command=SERVER, health="/", ready_seconds=30)
    killed = EngineProcesses(config, 3)
    url = killed.start(tmp_path, tmp_path)
    process = psutil.Process(int((tmp_path / "engine.pid").read_text("utf-8")))
    assert process.is_running()
    later = EngineProcesses(config, 3)
    again = later.start(tmp_path, tmp_path)
    assert again != url
    assert not process.is_running()
    assert later.stop(tmp_path)
    assert not later.stop(tmp_path)
    assert not killed.stop(tmp_path)
    # The number of a process that ended may belong to another one.
    (tmp_path / "engine.pid").write_text(str(os.getpid()), "utf-8")
    os.utime(tmp_path / "engine.pid", (1, 1))
    assert not later.stop(tmp_path)
    broken = EngineConfig(command=[sys.executable, "-c", "raise SystemExit('no drafter')"])
    with pytest.raises(UserError, match=r"exit status 1.*\n.*no drafter"):
        EngineProcesses(broken, 3).start(tmp_path / "b", tmp_path)


def answered(body: str, streamed: bool) -> tuple[str, str | None]:
    """The text of an answer, and why it ended."""
    if not streamed:
        (choice,) = json.loads(body)["choices"]
        return choice["message"]["content"], choice["finish_reason"]
    lines = [line.removeprefix("data: ") for line in body.split("\n") if "{" in line]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    content = "".join(choice["delta"].get("content") or "" for choice in choices)
    return content, choices[-1]["finish_reason"]


@pytest.mark.engine
@pytest.mark.timeout(560)
def test_a_whole_cycle_with_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM serves an export behind the recorder, which records what it answers. A drafter is
    trained on that and swapped in, and vLLM uses it. The texts of a random model teach little, so
    the test itself says that the new drafter is better."""
    needs("vllm")
    path = save_tiny(tmp_path / "target", "llama", **SHAPE)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():  # Some of its texts end.
        model.get_input_embeddings().weight[EOS_ID] *= 3
    model.save_pretrained(path)
    target = load_target(str(path))
    export_drafter(
        noisy(tmp_path / "drafter", target, 0.0),
        "vllm",
        tmp_path / "export",
        ExportOptions(gamma=3),
    )
    engine = EngineConfig(
        command=[*vllm_server(target), "--port", "{port}"],
        env={
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        ready_seconds=300,
        drain_seconds=10,
    )
    careful = RUN.replace("lr: 3e-3", "lr: 1e-5")
    (tmp_path / "run.yaml").write_text(careful.format(base=tmp_path), "utf-8")
    (tmp_path / "learn.yaml").write_text(LEARN.replace("records/a", "records/default"), "utf-8")
    config = read_learn_config(tmp_path / "learn.yaml")
    watch = config.watch.model_copy(update={"tolerance": 0.9})
    config = config.model_copy(update={"engine": engine, "form": "vllm", "watch": watch})
    first = tmp_path / "drafter"

    def drafts(run: TrainingRun, drafter: Path) -> np.ndarray:
        return np.array([[10, 9 if drafter != first else 1]] * len(run.prompts()))

    monkeypatch.setattr(TrainingRun, "drafts", drafts)
    engines = EngineProcesses(engine, 3)
    url = engines.start(tmp_path / "engine", tmp_path / "export")
    try:
        with recorded(url, tmp_path / "records") as client:
            ended: list[str] = []
            sent, tried = itertools.count(), itertools.count()

            def traffic(seconds: float = 0) -> None:
                number = next(sent)
                words = " ".join(WORDS[number * step % len(WORDS)] for step in (1, 2, 4))
                messages = [{"role": "user", "content": f"The {words} {number}"}]
                body = {"model": target.name, "messages": messages, "max_tokens": 48, "store": True}
                streamed = number % 2 == 1
                answer = client.post("/v1/chat/completions", json=body | {"stream": streamed})
                content, reason = answered(answer.text, streamed)
                if reason == "stop" and content.strip():
                    ended.append(content)
                    records = read_until(tmp_path / "records/default", len(ended))
                    assert records[-1]["messages"][1]["content"] == content

            learner = TenantLearner(
                config,
                engines,
                RecorderSwitch(str(client.base_url), ADMIN_KEY),
                Reporter(silent=True),
                lambda settings: Accelerator(cpu=True),
                sleep=traffic,
            )
            assert not learner._due()
            while len(ended) < 30 and next(tried) < 300:
                traffic()
            assert len(ended) == 30
            outcome = learner.once()
            assert outcome is not None
            assert outcome.kept, outcome.reason
            assert outcome.before is not None
            assert outcome.after is not None
            assert learner.recorder.serving != url
            assert read_counters(learner.recorder.serving).counts.accepted > 0
    finally:
        for directory in (tmp_path / "learning/versions/1", tmp_path / "engine"):
            engines.stop(directory)


def vllm_server(target: Target) -> list[str]:
    # The program `vllm` asks for the version of a package that its build for the CPU renames.
    python = str(environment_of("vllm") / "bin/python")
    speculative = {"method": "draft_model", "model": "{drafter}", "num_speculative_tokens": 3}
    return [
        *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", target.name),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "128"),
        *("--speculative-config", json.dumps(speculative)),
    ]
