"""A client of a service in the shape of OpenAI's API, on the standard library alone."""

import http.client
import json
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES = "/v1/responses"
JSON = "application/json"
TIMEOUT = 300  # seconds without a byte


@dataclass
class ClientAnswer:
    """What a client got. status: None if it hung up before there was one. texts, reasons: of the
    choices, by index. usage, counts: as the service reports them, {} if it does not. error: of a
    refusal, or in a stream. first, seconds: from the request to the first text, and to the end.
    ended: the answer is whole, or its stream has said `[DONE]` or had its last event."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    first: float = float("nan")
    seconds: float = float("nan")
    ended: bool = False

    @property
    def complete(self) -> bool:
        """Whether every text is there to its end."""
        return self.status == 200 and self.ended and self.error is None

    def read(self, value: dict[str, Any]) -> None:
        """Take up a whole answer, or one event of a stream."""
        if "response" in value or value.get("object") == "response":
            self._read_response(value.get("response", value))
            return
        if "delta" in value:  # of a response
            self.texts[0] = self.texts.get(0, "") + value["delta"]
        self.error = value.get("error", self.error)
        for choice in value.get("choices", ()):
            index = choice["index"]
            part = choice.get("message") or choice.get("delta") or choice
            text = part.get("content") or part.get("text") or ""
            self.texts[index] = self.texts.get(index, "") + text
            if choice.get("finish_reason"):
                self.reasons[index] = choice["finish_reason"]
        self.usage = value.get("usage") or self.usage
        self.counts = value.get("draftsmith") or self.counts

    def _read_response(self, response: dict[str, Any]) -> None:
        """Take up a response of /v1/responses. Its last state has the complete text."""
        self.error = response["error"]
        reason = {"completed": "stop", "incomplete": "length"}.get(response["status"])
        if reason is None:
            return
        (text,) = (part["text"] for item in response["output"] for part in item["content"])
        if self.texts.setdefault(0, text) != text:
            raise ValueError(f"the parts of the text are {self.texts[0]!r}, all of it is {text!r}")
        self.reasons[0], self.ended = reason, True
        usage = response["usage"]
        self.usage = {
            "prompt_tokens": usage["input_tokens"],
            "completion_tokens": usage["output_tokens"],
        }
        self.counts = response["draftsmith"]


def ask(
    url: str,
    body: dict[str, Any] | bytes,
    path: str = CHAT,
    *,
    kind: str = JSON,
    method: str = "POST",
    hang_up: int | None = None,
) -> ClientAnswer:
    """Send one request on its own connection and read the answer.

    url: `http://HOST:PORT`. body: JSON, or what is sent as it is. hang_up: close the connection
    after so many events of a stream; without a stream, so many hundredths of a second after the
    request. Raises OSError or HTTPException if nobody answers or the connection breaks before the
    end of the answer.
    """
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT)
    answer, begun = ClientAnswer(), time.perf_counter()
    try:
        # A service may refuse a body before it has read it; then its answer can be read.
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.request(method, path, content, {"content-type": kind})
        if hang_up is not None and not (isinstance(body, dict) and body.get("stream")):
            time.sleep(hang_up / 100)
            return answer
        response = connection.getresponse()
        answer.status = response.status
        answer.headers = {name.lower(): value for name, value in response.getheaders()}
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            for number, event in enumerate(events(response), start=1):
                answer.ended = event is None
                answer.read(event or {})  # the last event of a response ends it too
                if answer.first != answer.first and any(answer.texts.values()):
                    answer.first = time.perf_counter() - begun
                if number == hang_up:
                    return answer
            # The reader of lines does not say that a stream has broken off.
            ends = answer.reasons and answer.reasons.keys() == answer.texts.keys()
            if answer.error is None and not ends:
                raise ConnectionError("the stream has broken off")
        else:
            answer.read(json.loads(response.read() or b"{}"))
            answer.first, answer.ended = time.perf_counter() - begun, True
        answer.seconds = time.perf_counter() - begun
        return answer
    finally:
        connection.close()


def events(lines: Iterator[bytes]) -> Iterator[dict[str, Any] | None]:
    """The JSON of each server-sent event. None: `[DONE]`."""
    for line in lines:
        data = line.strip().removeprefix(b"data: ")
        if data.startswith(b"{"):
            yield json.loads(data)
        elif data == b"[DONE]":
            yield None


def ask_all(
    url: str, bodies: Sequence[dict[str, Any]], clients: int
) -> tuple[list[ClientAnswer], float]:
    """All answers, and the seconds that they took. So many clients each send their next request
    when they have their answer."""
    with ThreadPoolExecutor(clients) as pool:
        begun = time.perf_counter()
        answers = list(pool.map(lambda body: ask(url, body), bodies))
        return answers, time.perf_counter() - begun


def read_metrics(url: str) -> dict[str, float]:
    """The samples of /metrics: {name without prefix and model, with its other label: value}."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().splitlines()
    finally:
        connection.close()
    samples = (line.decode().rpartition(" ") for line in lines if not line.startswith(b"#"))
    noise = re.compile(r'^draftsmith:|,?model_name="[^"]*",?')
    return {noise.sub("", name).replace("{}", ""): float(value) for name, _, value in samples}
