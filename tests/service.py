"""A service over a tiny model, on a loopback port, for tests."""

import asyncio
import contextlib
import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import uvicorn.server

from decode.drafters import Drafter
from decode.drafters.lookup.ngram import NgramDrafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.model.loading import Target
from decode.settings import DecodeSettings
from decode.text import prompt_ids
from decode.text_stream import decode
from draftsmith.net.access import Guard
from draftsmith.net.listen import bind
from draftsmith.serve.api import Service
from draftsmith.serve.batching.request_batcher import RequestBatcher
from draftsmith.serve.batching.requests import AnswerChoice, DecodeRequest, RequestBounds
from draftsmith.serve.server import ServiceServer, make_service
from tests.tiny import save_small_lm, tiny_llama, tiny_target

MODEL = "tiny-llama"
LONG = 200  # tokens: a text that is still decoding when a test looks
CHAT = "/v1/chat/completions"
QUESTION = "What does the drafter propose?"
SAMPLED = DecodeSettings(gamma=3, sampling=Sampling(0.8, top_p=0.95))
target = functools.cache(functools.partial(tiny_target, max_positions=512))
# uvicorn looks every 0.1 s whether it is to end, and then waits as long. Tests end many servers.
uvicorn.server.asyncio = SimpleNamespace(  # type: ignore[assignment]
    **vars(asyncio) | {"sleep": lambda seconds: asyncio.sleep(seconds / 10)}
)
# Every client reads the system's certificates, which takes longer than most requests here.
httpx2._transports.default.create_ssl_context = functools.cache(httpx2.create_ssl_context)
# What `alone` gave, with the target, so that no other one gets its id.
_ALONE: dict[str, tuple[Target, list[int]]] = {}


@dataclass
class Running:
    """A service with its server, and the requests that its batcher has taken."""

    service: Service
    server: ServiceServer
    url: str
    requests: list[DecodeRequest]

    @property
    def batcher(self) -> RequestBatcher:
        return self.service.batcher

    def client(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=60)

    def metrics(self) -> dict[str, float]:
        """The samples of all series: name, with labels other than the model's, and value."""
        with self.client() as client:
            lines = client.get("/metrics").text.splitlines()
        samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        plain = f'model_name="{MODEL}"'
        return {
            re.sub(f",?{plain},?", "", name).replace("{}", ""): float(value)
            for name, _, value in samples
        }

    def until_idle(self) -> None:
        """Wait until no text waits or runs."""
        until(lambda: self.batcher.held == 0)

    def texts(self) -> list[AnswerChoice]:
        return [choice for request in self.requests for choice in request.choices]


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for a condition. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.005)


@contextlib.contextmanager
def serving(
    target: Target,
    drafter: Drafter | None = None,
    settings: DecodeSettings | None = None,
    *,
    drain_seconds: float = 30,
    api_key: str | None = None,
    max_tokens: int | None = None,
    drafter_name: str = "ngram",
    options: dict[str, Any] | None = None,
    **bounds: Any,
) -> Iterator[Running]:
    """A service on a free port of the loopback, whose server runs in a thread. options: more of
    `make_service`."""
    service = make_service(
        target,
        drafter or NgramDrafter(1, 2),
        settings or DecodeSettings(gamma=3),
        RequestBounds(**bounds),
        drafter_name=drafter_name,
        max_tokens=max_tokens,
        **{"guard": Guard(key=api_key, admin_key=api_key), **(options or {})},
    )
    requests: list[DecodeRequest] = []
    submit = service.batcher.submit

    def recorded(request: DecodeRequest) -> None:
        submit(request)
        requests.append(request)

    service.batcher.submit = recorded  # type: ignore[method-assign]
    server = ServiceServer(service, drain_seconds)
    bound = bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        until(lambda: server.started)
        yield Running(service, server, f"http://127.0.0.1:{bound.getsockname()[1]}", requests)
    finally:
        try:
            service.close(30)
        finally:
            thread.join(30)
            bound.close()
        assert not service.batcher.alive
        assert not thread.is_alive()


def alone(
    target: Target, prompt: Any, limit: int, settings: DecodeSettings | None = None, **options: Any
) -> list[int]:
    """The tokens that the decode gives without the service. What was asked for before is kept."""
    settings = settings or DecodeSettings(gamma=3)
    asked_for = repr((id(target), prompt, limit, settings, options))
    if asked_for not in _ALONE:
        decoder: Decoder = settings.decoder(target, NgramDrafter(1, 2))[0]
        ids = prompt_ids(prompt, target.tokenizer)
        _ALONE[asked_for] = target, decoder.decode([ids], limit, **options).outputs[0]
    return _ALONE[asked_for][1]


def words(tokens: list[int]) -> str:
    return decode(target().tokenizer, tokens)


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def chat(content: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": asked(content), **fields}


def ask(client: httpx2.Client, content: str = QUESTION, **fields: Any) -> Any:
    """The response to a chat."""
    return client.post(CHAT, json=chat(content, **fields))


def text_of(answer: Any) -> str:
    return str(answer.json()["choices"][0]["message"]["content"])


def begin(client: httpx2.Client, **fields: Any) -> Any:
    """A stream of a long text that has begun."""
    body = chat(QUESTION, stream=True, ignore_eos=True, **({"max_tokens": LONG} | fields))
    response = client.send(client.build_request("POST", CHAT, json=body), stream=True)
    assert response.status_code == 200, response.read()
    return response


def events(lines: Iterator[str]) -> list[Any]:
    """The events of a stream. [DONE] stays a text."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [event if event == "[DONE]" else json.loads(event) for event in data]


def streamed(client: httpx2.Client, body: dict[str, Any], path: str = CHAT) -> list[Any]:
    """The chunks of an answer in a stream."""
    with client.stream("POST", path, json=body | {"stream": True}) as stream:
        *chunks, end = events(stream.iter_lines())
    assert end == "[DONE]"
    return chunks


def text_in(chunks: list[Any]) -> str:
    """The text of a chat's chunks."""
    deltas = (choice["delta"] for chunk in chunks for choice in chunk["choices"])
    return "".join(delta.get("content", "") for delta in deltas)


class Held:
    """Keeps the batcher from its next pass until it is released."""

    def __init__(self, running: Running) -> None:
        self._go, self.waits = threading.Event(), threading.Event()
        self._batcher: Any = running.batcher
        self._before = self._batcher._pass
        self._batcher._pass = self._wait

    def _wait(self) -> None:
        self.waits.set()
        self._go.wait(60)
        self._before()

    def release(self) -> None:
        self._batcher._pass = self._before
        self._go.set()


def set_to(client: httpx2.Client, **changes: Any) -> Any:
    return client.post("/admin/settings", json=changes)


def save_small(directory: Path) -> Path:
    """A drafter directory for the tiny target: a smaller model."""
    shape: dict[str, Any] = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1}
    return save_small_lm(directory, tiny_llama(**shape, seed=9, max_positions=512), target())
