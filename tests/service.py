"""A service over a tiny model, on a loopback port, for tests."""

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx2

from decode.drafters import Drafter
from decode.drafters.lookup.ngram import NgramDrafter
from decode.loop.decoding import Decoder
from decode.model.loading import Target
from decode.settings import DecodeSettings
from decode.text import prompt_ids
from draftsmith.net.access import Guard
from draftsmith.net.listen import bind
from draftsmith.serve.api import Service
from draftsmith.serve.batching.request_batcher import RequestBatcher
from draftsmith.serve.batching.requests import AnswerChoice, DecodeRequest, RequestBounds
from draftsmith.serve.server import ServiceServer, make_service

MODEL = "tiny-llama"
LONG = 200  # tokens: a text that is still decoding when a test looks


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
    """The tokens that the decode gives without the service."""
    settings = settings or DecodeSettings(gamma=3)
    decoder: Decoder = settings.decoder(target, NgramDrafter(1, 2))[0]
    return decoder.decode([prompt_ids(prompt, target.tokenizer)], limit, **options).outputs[0]


def chat(content: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def events(lines: Iterator[str]) -> list[Any]:
    """The events of a stream. [DONE] stays a text."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [event if event == "[DONE]" else json.loads(event) for event in data]
