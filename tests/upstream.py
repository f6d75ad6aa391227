"""A small inference engine for tests of the recorder: it answers as told, and can be restarted."""

import asyncio
import contextlib
import hashlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from draftsmith.learn.record.consent import Keys
from draftsmith.learn.record.proxy import LIMITS, RecordingProxy
from draftsmith.learn.record.records import Records, Retention
from draftsmith.learn.record.upstream import Upstreams
from draftsmith.net.access import Guard
from draftsmith.net.http_server import HttpServer
from draftsmith.net.limits import ServerLimits
from draftsmith.net.listen import bind
from tests.service import until

ADMIN_KEY = "admin"
DRAFTED = 40


@dataclass
class FakeEngine:
    """Answers chats with `reply`. left: how many clients hung up. slow: seconds between chunks.
    rate: of the DRAFTED tokens that it says each chat drafted, how many were accepted."""

    name: str = "engine"
    reply: str = "It proposes tokens."
    finish: str = "stop"
    slow: float = 0.0
    asked: list[Any] = field(default_factory=list)
    left: int = 0
    rate: float = 0.5

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/echo/{rest:path}", self._echo, methods=["GET", "POST", "PUT", "HEAD"]),
                Route("/health", lambda request: Response(self.name)),
                Route("/metrics", self._metrics),
                Route("/v1/models", lambda request: JSONResponse({"data": [{"id": "tiny"}]})),
            ]
        )

    def _metrics(self, request: Request) -> Response:
        drafted = DRAFTED * len(self.asked)
        counts = {"draft": drafted, "accepted": round(self.rate * drafted)}
        lines = (f"vllm:spec_decode_num_{k}_tokens_total {v}\n" for k, v in counts.items())
        return Response("".join(lines))

    async def _echo(self, request: Request) -> Response:
        """All that came, and bytes that are no text."""
        headers = sorted((name.decode(), value.decode()) for name, value in request.headers.raw)
        seen = {
            "method": request.method,
            "path": request.scope["raw_path"].decode(),
            "query": request.scope["query_string"].decode(),
            "headers": [pair for pair in headers if pair[0] not in ("host", "connection")],
            "sha256": hashlib.sha256(await request.body()).hexdigest(),
        }
        body = json.dumps(seen).encode() + bytes(range(256))
        return Response(body, 203, {"x-engine": self.name, "content-encoding": "none-such"})

    async def _chat(self, request: Request) -> Response:
        asked = await request.json()
        self.asked.append(asked)
        base = {"id": f"chatcmpl-{len(self.asked)}", "model": "tiny"}
        if not asked.get("stream"):
            waited = 0.0
            while waited < self.slow:
                if await request.is_disconnected():
                    self.left += 1
                await asyncio.sleep(0.01)
                waited += 0.01
            message = {"role": "assistant", "content": self.reply, "tool_calls": []}
            choice = {"index": 0, "message": message, "finish_reason": self.finish}
            return JSONResponse(base | {"choices": [choice]})
        return StreamingResponse(self._pieces(base), media_type="text/event-stream")

    async def _pieces(self, base: dict[str, Any]) -> AsyncIterator[bytes]:
        words = self.reply.split(" ")
        try:
            for i, word in enumerate(words):
                delta = {"content": word if i == 0 else f" {word}"}
                choice = {"index": 0, "delta": delta, "finish_reason": None}
                yield b"data: " + json.dumps(base | {"choices": [choice]}).encode() + b"\n\n"
                await asyncio.sleep(self.slow)
            end = {"index": 0, "delta": {}, "finish_reason": self.finish}
            yield b"data: " + json.dumps(base | {"choices": [end]}).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.left += 1
            raise


@contextlib.contextmanager
def served(app: Any, port: int = 0, limits: ServerLimits | None = None) -> Iterator[str]:
    """The application's address on the loopback. At the end its connections are cut. limits: it is
    a server of draftsmith with these."""
    with bind("127.0.0.1", port) as bound:
        if limits is None:
            config = uvicorn.Config(
                app,
                ws="none",
                log_level="critical",
                lifespan="off",
                timeout_graceful_shutdown=1,
                date_header=False,
                server_header=False,
            )
            server = uvicorn.Server(config)
        else:
            server = HttpServer(app, 1, limits=limits, lifespan="auto", date_header=False)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            until(lambda: server.started)
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


@contextlib.contextmanager
def recorded(
    upstream: str,
    directory: Path,
    keys: Keys | None = None,
    retention: Retention | None = None,
    limits: ServerLimits = LIMITS,
) -> Iterator[httpx2.Client]:
    """A client of a recorder before an engine."""
    recorder = RecordingProxy(
        Upstreams(upstream),
        directory,
        keys or Keys(),
        retention or Retention(),
        time.time,
        Guard(admin_key=ADMIN_KEY),
        limits=limits,
    )
    with (
        served(recorder.guarded(), limits=limits) as url,
        httpx2.Client(base_url=url, timeout=30, trust_env=False) as client,
    ):
        yield client


def read_until(directory: Path, count: int) -> list[dict[str, Any]]:
    """A tenant's records, once there are so many."""
    records = Records(directory)
    until(lambda: len(records.read()) >= count, 10)
    return records.read()
