"""The service in a process of its own: under clients that do everything, and when it is killed."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any

import openai
import pytest

from benchmarks.serve.client import ask, read_metrics
from benchmarks.serve.process import MODEL, ServiceProcess, serve_command
from decode.text_stream import decode
from draftsmith.net.listen import bind
from tests.service import alone, until
from tests.tiny import save_tiny, tiny_target
from tools.soak import Texts, soak

pytestmark = pytest.mark.slow

PROMPTS = ("The dog", "She sells sea shells", "What does the drafter propose?", "12 and 30")
LIMITS = (3, 17, 40)
CONTEXT = 4096
SOAK = 8.0  # seconds
SOME = 5  # of each kind of request, also on a slow machine


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    model = save_tiny(tmp_path_factory.mktemp("model"), max_positions=CONTEXT)
    options = ["--device", "cpu", "--dtype", "float32", "--gamma", "3"]
    return serve_command(str(model), "ngram", *options, "--limits", "max_rows=4,max_waiting=6")


@pytest.fixture(scope="module")
def texts() -> Texts:
    target = tiny_target(max_positions=CONTEXT)
    longest = {
        prompt: alone(target, [{"role": "user", "content": prompt}], max(LIMITS))
        for prompt in PROMPTS
    }
    return {
        (prompt, limit): decode(target.tokenizer, tokens[:limit])
        for prompt, tokens in longest.items()
        for limit in LIMITS
    }


def long_answer(tokens: int) -> dict[str, Any]:
    """What asks for a stream of so many tokens."""
    asked = {"model": MODEL, "messages": [{"role": "user", "content": PROMPTS[0]}]}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return asked | stream | {"ignore_eos": True, "max_tokens": tokens, "temperature": 0}


@pytest.mark.thorough
def test_clients_that_do_everything_leave_nothing_behind(command: list[str], texts: Texts) -> None:
    with ServiceProcess(command) as service:
        service.warm_up()
        result = soak(service.url, service.process, texts, seconds=SOAK, clients=8, rounds=4)
        assert result.faults == []
        assert result.same_again > SOME
        assert {"200", "400", "404", "405", "413", "415", "503"} <= set(result.statuses)
        assert min(result.hung_up, result.same_as_alone, result.same_as_before) > SOME
        assert result.growth < 64


def test_after_sigterm_what_has_begun_comes_to_its_end(command: list[str]) -> None:
    long = long_answer(300)
    with ServiceProcess(command) as service, ThreadPoolExecutor() as pool:
        assert f"is at {service.url}/v1" in service.output()
        streams = [pool.submit(ask, service.url, long) for _ in range(4)]
        until(lambda: read_metrics(service.url)["num_requests_running"] == 4)
        service.signal(signal.SIGTERM)
        until(lambda: ask(service.url, b"", "/health", method="GET").status == 503)
        late = ask(service.url, long)
        assert (late.status, late.error and late.error["code"]) == (503, "draining")
        answers = [stream.result() for stream in streams]
        assert all(answer.complete for answer in answers)
        assert {answer.usage["completion_tokens"] for answer in answers} == {300}
        assert len({answer.texts[0] for answer in answers}) == 1
        assert service.wait(30) == 0
    bind("127.0.0.1", service.port).close()  # the port is free at once


@pytest.mark.thorough
def test_killed_in_the_midst_of_answers_the_service_starts_again_at_its_port(
    command: list[str], texts: Texts
) -> None:

    def answer_of(prompt: str) -> Any:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=12) as client:
            messages: Any = [{"role": "user", "content": prompt}]
            options: Any = {"model": MODEL, "messages": messages, "max_tokens": 40}
            return client.chat.completions.create(**options, temperature=0)

    with ServiceProcess(command) as service, ThreadPoolExecutor(8) as pool:
        url = service.url
        done = threading.Event()

        def asking(prompt: str) -> list[str]:
            gotten = []
            while not done.is_set() or not gotten:
                gotten.append(answer_of(prompt).choices[0].message.content)
            return gotten

        clients = [pool.submit(asking, prompt) for prompt in PROMPTS]
        until(lambda: read_metrics(url)["generation_tokens_total"] > 200)
        cut = pool.submit(ask, url, long_answer(3000))
        until(lambda: read_metrics(url)["num_requests_running"] == 4)
        service.kill()
        with pytest.raises((OSError, HTTPException)):
            cut.result()
        with ServiceProcess(command, service.port):
            done.set()
            for prompt, client in zip(PROMPTS, clients, strict=True):
                assert set(client.result(60)) == {texts[prompt, 40]}
    bind("127.0.0.1", service.port).close()
