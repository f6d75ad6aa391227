"""The round trip through engines: transformers here; others, marked `engine`, when installed."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from typer.testing import CliRunner

from decode.base.errors import UserError
from decode.model.loading import Target, load_target
from draftsmith.auditing.findings import Finding, Judgement
from draftsmith.auditing.verify_export import ExportVerification, engine_for, verify_export
from draftsmith.cli.main import app
from draftsmith.export import ExportOptions
from draftsmith.export.compare_acceptance import Counting, OwnLoop, count_drafts
from draftsmith.export.engine_kinds import ENGINES, EngineTask
from draftsmith.export.engine_kinds.vllm import VLLM
from draftsmith.export.export_directory import check_export, export_drafter, reload_export
from tests.export import (
    PROMPTS,
    SHAPE,
    assert_same_counts,
    distill_import,
    needs,
    save_target,
    task,
)
from tests.test_target import write_gguf
from tests.tiny import plain_texts, save_small_lm, save_tiny, tiny_model, with_noise
from tools.child_job import run_job
from train.engines.child_process import serving, start_process, stop_process
from train.measure.same_text import identical


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    write_gguf(path)
    return load_target(str(path))


def export(
    directory: Path, target: Target, form: str = "hf", noise: float = 0.06, **shape: Any
) -> Path:
    """The target with noise on its weights, which it agrees with half of the time, exported."""
    model = with_noise(tiny_model("llama", **shape), noise)
    save_small_lm(directory / "drafter", model, target)
    export_drafter(directory / "drafter", form, directory / "export", ExportOptions(gamma=3))
    return directory / "export"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Path:
    return export(tmp_path_factory.mktemp("hf"), target)


def test_transformers_counts_what_our_loop_counts(target: Target, exported: Path) -> None:
    """To the token: same drafts, same verdicts, ends of texts included. A token that the texts are
    full of ends them."""
    which = replace(target, eos_token_ids=(_common_token(target),))
    found = verify_export("transformers", task(which, exported, prompts=PROMPTS[:12]))
    assert_same_counts(found)
    assert found.ours.drafted > 100
    assert 0.1 < (found.ours.rate or 0) < 0.9
    said = found.to_dict()
    assert said["our_efficiency"] == said["engine_efficiency"]
    assert said["loads"] == []  # `test_vllm` has speeds


def _common_token(target: Target) -> int:
    texts = plain_texts(target.model, PROMPTS[:20], 24)
    tokens = torch.tensor([token for text in texts for token in text[6:]])
    return int(tokens.bincount().argmax())


def test_ways_of_counting_differ(target: Target, exported: Path) -> None:
    which = replace(target, eos_token_ids=(_common_token(target),))
    drafter = reload_export(exported, check_export(exported), which)
    own = OwnLoop(which, drafter, PROMPTS[:20], gamma=3, max_new_tokens=24)

    def counted(**how: bool) -> tuple[int, int]:
        return count_drafts(own, Counting(**how))

    drafted, accepted = counted()
    whole, until_end = (counted(past_end=True, end_is_last=x) for x in (False, True))
    assert until_end[0] == whole[0] > drafted
    assert until_end[1] < accepted < whole[1]
    assert counted(stops_at_eos=True)[0] <= drafted
    assert counted(stops_at_eos=True)[1] == accepted
    # As if no text ended but by its end-of-text token: the last drafts are longer.
    assert counted(past_length=True)[0] > drafted
    assert counted(past_length=True, past_end=True)[0] % 3 == 0
    # One more pass for each text, which drafts γ tokens more.
    assert counted(first_drafted=True)[0] > drafted


def test_llama_server_accepts_an_end_only_as_the_last_of_a_draft() -> None:
    counting, end = ENGINES["llama-server"].counting, 9
    # Of the draft 1, end, 2: what the pass yields, and how many it counts.
    for block, accepted in ([3], 0), ([1, end], 1), ([1, end, 2, 4], 1), ([1, end, 3], 1):
        draft = [1, 2, 2] if block == [1, end] else [1, end, 2]
        assert counting.of_draft(draft, block, (end,)) == (3, accepted)
    assert counting.of_draft([1, end], [1, end, 3], (end,)) == (2, 2)


@pytest.mark.parametrize(
    ("verdict", "theirs", "failures"),
    [
        (Judgement.EQUAL, (1000, 500), 0),
        (Judgement.WRONG, (1000, 100), 1),
        (Judgement.UNJUDGED, (10, 5), 1),
        (Judgement.WRONG, None, 2),
    ],
)
def test_what_is_not_equal_is_a_failure(
    verdict: Judgement, theirs: tuple[int, int] | None, failures: int
) -> None:
    names = ("drafted", "accepted", "our_drafted", "our_accepted")
    figures = dict(zip(names, (*theirs, 1000, 500), strict=True)) if theirs else {}
    finding = Finding("drafts", "acceptance", verdict, "some", figures=figures)
    found = ExportVerification("vllm", "1", 3, 8, [finding], [], "the cause")
    assert len(found.failures) == failures
    assert sum("the cause" in x for x in found.failures) == (failures == 1)


def test_texts_may_differ_within_rounding(target: Target) -> None:
    prompt, text = [5, 17], [9, 42, 7]
    ids = torch.tensor([[*prompt, 9]])
    with torch.no_grad():
        logits = target.model(ids).logits[0, -1]
    order = logits.argsort(descending=True).tolist()
    spread = float((logits[order[0]] - logits[order[1]]) / logits.abs().max())
    pair = [[9, order[0]]], [[9, order[1]]]
    assert identical(target, [prompt], *pair, rounding=1.01 * spread) == (0, 1)
    assert identical(target, [prompt], *pair, rounding=0.99 * spread) == (0, 0)
    assert identical(target, [prompt], [text], [text], rounding=0) == (1, 1)
    # One went on where the other ended: as if it had said an end of text there.
    assert identical(target, [prompt], [text], [text[:1]], rounding=1e-6) == (0, 0)


def test_engines_by_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"llama-server reads gguf.*verify it with .*transformers"):
        engine_for("llama-server", "hf")
    with pytest.raises(UserError, match="unknown engine 'lama'"):
        engine_for("lama", "hf")
    monkeypatch.setattr(VLLM, "version", lambda self, python: "0.33.0+cpu")
    with pytest.raises(UserError, match=r"vllm 0\.33\.0\+cpu is installed, .* medusa up to 0\.32"):
        engine_for("vllm", "medusa")
    engine_for("vllm", "eagle3")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--verify", "transformers", "--engine-dtype", "bfloat16"], "--engine-dtype is for"),
        (["--verify", "llama-server", "--engine-python", "python"], "--engine-python is for"),
        (["--verify", "vllm", "--concurrency", "1,x"], "numbers such as 1,8,32"),
        (["--verify", "vllm", "--engine-options", "[1]"], "expected a JSON object"),
        (["--verify", "http://gpu:8000"], "draftsmith audit http://gpu:8000 --target MODEL"),
        (
            ["--verify", "vllm", "--engine-python", "/none/bin/python"],
            "/none/bin/python has no vLL",
        ),
    ],
)
def test_options_of_an_engine_are_refused_before_anything_is_measured(
    tmp_path: Path, words: list[str], message: str
) -> None:
    prompts = ("--prompts", str(tmp_path / "none.jsonl"))
    said = CliRunner().invoke(app, ["export", str(tmp_path / "none"), "--check", *prompts, *words])
    assert (said.exit_code, message in said.stderr) == (2, True), said.stderr


def test_an_engine_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_ENGINES", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"not installed\. Install it with: make engine-llama"):
        engine_for("llama-server", "gguf")


def test_an_export_for_another_target(tmp_path: Path, exported: Path) -> None:
    other = load_target(str(save_tiny(tmp_path / "other", vocab=320)))
    with pytest.raises(UserError, match="has another vocabulary than the target"):
        verify_export("transformers", task(other, exported))


# Children


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine `it` whose environment is ours; where its script is to be written."""
    monkeypatch.setenv("DRAFTSMITH_ENGINES", str(tmp_path))
    (tmp_path / "it" / "bin").mkdir(parents=True)
    (tmp_path / "it" / "bin" / "python").symlink_to(sys.executable)
    return tmp_path / "script.py"


ECHO = """
import os, pathlib, sys
job, answer = map(pathlib.Path, sys.argv[1:])
answer.write_text(f'[{job.read_text()}, "{os.environ["GIVEN"]}"]')
"""


def test_a_child_answers(python: Path) -> None:
    python.write_text(ECHO, encoding="utf-8")
    assert run_job("it", python, {"a": [1, 2]}, {"GIVEN": "x"}) == [{"a": [1, 2]}, "x"]


def test_a_child_that_fails_says_why(python: Path) -> None:
    python.write_text("raise SystemExit('no such head size')", encoding="utf-8")
    with pytest.raises(UserError, match=r"it ended with exit status 1(?s:.)*no such head size"):
        run_job("it", python, {})
    python.write_text("print('all is well')", encoding="utf-8")
    with pytest.raises(UserError, match=r"it wrote no valid answer(?s:.)*all is well"):
        run_job("it", python, {})


def test_a_child_that_hangs_is_ended_with_its_own(
    python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.child_job.HANG_SECONDS", 3.0)
    python.write_text(
        "import os, pathlib, time\n"
        "child = os.fork()\n"
        "if child: pathlib.Path(os.environ['FILE']).write_text(str(child))\n"
        "time.sleep(60)",
        encoding="utf-8",
    )
    file = python.with_name("pid")
    with pytest.raises(UserError, match="it did not end within 3 s"):
        run_job("it", python, {}, {"FILE": str(file)})
    assert _ends(int(file.read_text("utf-8")))


def _ends(process: int) -> bool:
    for _ in range(100):  # A killed process is gone a little later.
        if not _runs(process):
            return True
        time.sleep(0.1)
    return False


def _runs(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


STUBBORN = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child: pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {child}")
time.sleep(60)
"""


def test_a_guarded_process_does_not_outlive_ours(tmp_path: Path) -> None:
    """Nor does what it started. The end of our process closes the pipe, as this test does."""
    file = tmp_path / "pids"
    with (tmp_path / "log").open("w+b") as log:
        command = [sys.executable, "-c", STUBBORN, str(file)]
        process = start_process("it", command, log, guarded=True)
        assert process.stdin is not None
        try:
            for _ in range(100):
                if file.exists() and file.read_text("utf-8"):
                    break
                time.sleep(0.1)
            started = [int(pid) for pid in file.read_text("utf-8").split()]
            assert len(started) == 2
            assert all(map(_runs, started))
            process.stdin.close()
            assert all(map(_ends, started))
        finally:
            stop_process(process)


# Servers


def _script(path: Path, body: str) -> list[str]:
    path.write_text(body, encoding="utf-8")
    return [sys.executable, str(path), "{port}"]


ANSWERS = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'{"ok": 1}')
    def do_POST(self):
        print("about to die", flush=True)
        import os; os._exit(3)
    def log_message(self, *args): pass
print("listening", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_stopped_whatever_happens(tmp_path: Path) -> None:
    command = _script(tmp_path / "s.py", ANSWERS)
    servers = []

    def use() -> None:
        with serving("it", command, "/health") as server:
            servers.append(server)
            assert server.ask("/anything") == {"ok": 1}
            raise KeyError

    with pytest.raises(KeyError):
        use()
    assert servers[0]._process.poll() is not None


def test_a_server_that_dies_says_why(tmp_path: Path) -> None:
    command = _script(tmp_path / "s.py", ANSWERS)
    with (
        pytest.raises(UserError, match=r"it did not answer(?s:.)*about to die"),
        serving("it", command, "/health") as server,
    ):
        server.ask("/completion", {})
    command = _script(tmp_path / "d.py", "print('no such model'); raise SystemExit(7)")
    with (
        pytest.raises(UserError, match=r"exit status 7(?s:.)*no such model"),
        serving("it", command, "/health"),
    ):
        pass
    with (
        pytest.raises(UserError, match=r"status 127(?s:.)*it cannot be started"),
        serving("it", [str(tmp_path / "none")], "/health"),
    ):
        pass


def test_a_server_that_never_gets_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.engines.child_process.READY_SECONDS", 0.5)
    command = _script(tmp_path / "s.py", "import time; time.sleep(60)")
    with (
        pytest.raises(UserError, match="was not ready after"),
        serving("it", command, "/health"),
    ):
        pass


# Engines in environments of their own


def _start(name: str, asked: EngineTask, directory: Path) -> None:
    with ENGINES[name].serving(asked, True, directory):
        pass


@pytest.mark.engine
def test_llama_server(tmp_path: Path, target: Target) -> None:
    """To the token: same drafts, same verdicts."""
    needs("llama-server")
    path = export(tmp_path, target, "gguf")
    found = verify_export("llama-server", task(target, path))
    assert_same_counts(found)
    assert found.ours.accepted > 100


@pytest.mark.engine
def test_llama_server_refuses_half_a_drafter(tmp_path: Path, target: Target) -> None:
    needs("llama-server")
    path = export(tmp_path, target, "gguf")
    file = path / "drafter.gguf"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(UserError, match="ended before it was ready"):
        _start("llama-server", task(target, path), tmp_path)


@pytest.fixture(scope="module")
def for_vllm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Path]:
    """A target that vLLM has kernels for, and a drafter for it that was imported and trained."""
    place = tmp_path_factory.mktemp("vllm")
    target = save_target(place / "target")
    tuned = distill_import(place, target, export(place, target, **SHAPE))
    export_drafter(tuned, "hf", place / "again")
    return target, place / "again"


@pytest.mark.engine
def test_vllm(for_vllm: tuple[Target, Path]) -> None:
    """To the token: same drafts, same verdicts."""
    needs("vllm")
    asked = replace(task(*for_vllm), loads=(1, 4), options={"seed": 3})
    found = verify_export("vllm", asked)
    assert [load.requests for load in found.loads] == [1, 4]
    assert all(load.plain > 0 and load.drafted > 0 for load in found.loads)
    assert_same_counts(found)
    assert found.ours.accepted > 100


@pytest.mark.engine
def test_openvino(for_vllm: tuple[Target, Path]) -> None:
    needs("openvino")
    found = verify_export("openvino", task(*for_vllm, max_new_tokens=64))
    assert found.failures == []
    assert found.theirs.accepted > 100


def test_save_tiny_is_no_export(tmp_path: Path, target: Target) -> None:
    save_tiny(tmp_path / "plain")
    with pytest.raises(UserError, match="manifest"):
        verify_export("transformers", task(target, tmp_path / "plain"))
