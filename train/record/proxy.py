"""A proxy that passes bytes on untouched, and records the answers that may be recorded.

It is one ASGI application: routes would have to know every path of every engine. It reads a request
completely, sends it on, and passes the answer on piece by piece. A copy of a recorded answer is
read at its end. Recording can fail; the answer has then been passed on all the same.
"""

import asyncio
import contextlib
import ipaddress
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from decode.errors import UserError
from train.net.guard import LOCAL, Guard, error_response
from train.record.answers import exchanges
from train.record.consent import Keys
from train.record.records import Records, Retention, make_record, tenants
from train.record.upstream import Upstream, Upstreams

CHAT = "/v1/chat/completions"
ADMIN = "/admin/upstream"
LONGEST_BODY = 64 << 20  # bytes of a request; images are sent in bodies
LONGEST_ANSWER = 16 << 20  # bytes of an answer that can be recorded
PRUNE_SECONDS = 600.0
# These belong to one connection and not to a message (RFC 9110, 7.6.1).
HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade".split()
)
# Our server has answered `expect`, and the client's request writes the host of the engine.
OURS = frozenset((b"host", b"expect"))

log = logging.getLogger("draftsmith.record")
Headers = list[tuple[bytes, bytes]]


@dataclass
class Recorder:
    """The application. directory: of the tenants' directories. clock: seconds since 1970.
    guard: who may call. Without an admin_key the upstream cannot be switched."""

    upstreams: Upstreams
    directory: Path
    keys: Keys
    retention: Retention
    clock: Callable[[], float]
    guard: Guard = LOCAL
    _writing: set["asyncio.Task[None]"] = field(default_factory=set)

    def guarded(self) -> ASGIApp:
        """The application behind its guard. An engine takes bodies of other types than JSON."""
        return replace(self.guard, json=False).around(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003})
        elif scope["path"] == ADMIN:
            await self._admin(scope, receive, send)
        else:
            await self._pass_on(scope, receive, send)

    # --- answers ----------------------------------------------------------------------------------

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await _read_body(receive)
        except ClientDisconnect:
            return
        if len(body) > LONGEST_BODY:
            error = f"the body is longer than {LONGEST_BODY:,} bytes; shorten it"
            await _refuse(413, error)(scope, receive, send)
            return
        upstream = self.upstreams.current
        upstream.in_flight += 1
        answering = asyncio.create_task(self._answer(upstream, scope, body, send))
        leaving = asyncio.create_task(_hang_up(receive))
        try:
            # An answer that the client no longer waits for is cancelled, which closes the
            # connection to the engine: it sees the hang-up.
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answering, leaving):
                task.cancel()
            done = await asyncio.gather(answering, leaving, return_exceptions=True)
            upstream.in_flight -= 1
            await self.upstreams.close_idle()
        if isinstance(done[0], Exception):
            raise done[0]

    async def _answer(self, upstream: Upstream, scope: Scope, body: bytes, send: Send) -> None:
        target = scope.get("raw_path") or scope["path"].encode()
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        headers = _forwarded(scope["headers"], OURS)
        try:
            response = await upstream.send(scope["method"], target, headers, body)
        except httpx2.TransportError as error:
            log.warning("%s does not answer: %s", upstream.url, _reason(error))
            message = f"the engine at {upstream.url} does not answer: {_reason(error)}; try again"
            await _refuse(502, message)(scope, _nothing, send)
            return
        try:
            answer = _forwarded(response.headers.raw)
            await send(
                {"type": "http.response.start", "status": response.status_code, "headers": answer}
            )
            copy = _Copy(self._tenant(scope, body), response)
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            async for piece in response.stream:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                copy.add(piece)
            # Before the end is sent: with it the server reports a hang-up, which cancels this task.
            if copy.tenant is not None:
                writing = asyncio.create_task(asyncio.to_thread(self._record, copy, body))
                self._writing.add(writing)
                writing.add_done_callback(self._writing.discard)
            await send({"type": "http.response.body"})
        except httpx2.TransportError as error:
            # The server sees that the answer has no end, and closes the client's connection.
            log.warning("%s broke off an answer: %s", upstream.url, _reason(error))
        finally:
            await response.aclose()

    # --- recording --------------------------------------------------------------------------------

    def _tenant(self, scope: Scope, body: bytes) -> str | None:
        if scope["method"] != "POST" or not scope["path"].endswith(CHAT):
            return None
        asked = _object(body)
        if asked is None:
            return None
        sent = dict(scope["headers"]).get(b"authorization", b"")
        return self.keys.tenant_of(sent.decode("latin-1"), asked)

    def _record(self, copy: "_Copy", body: bytes) -> None:
        assert copy.tenant is not None
        asked = _object(body) or {}
        user = asked.get("safety_identifier") or asked.get("user")
        records = Records(self.directory / copy.tenant, self.retention)
        try:
            for exchange in exchanges(asked, bytes(copy.answer), stream=copy.stream):
                name = user if isinstance(user, str) else None
                records.append(make_record(exchange, name, self.clock()))
        except UserError as error:
            log.error("%s", error)

    # --- the switch -------------------------------------------------------------------------------

    async def _admin(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        if refusal is None and scope["method"] == "POST":
            asked = _object(await _read_body(receive)) or {}
            try:
                await self.upstreams.switch(str(asked.get("url", "")))
            except UserError as error:
                refusal = _refuse(400, str(error))
        response = refusal or JSONResponse(self.upstreams.describe())
        await response(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        client = scope.get("client")
        if self.guard.admin_key is None or client is None or not _is_loopback(client[0]):
            return _refuse(404, f"{ADMIN} is off, or is open only to this machine")
        if scope["method"] not in ("GET", "POST"):
            return _refuse(405, f"{ADMIN} takes GET and POST")
        return None

    # --- life -------------------------------------------------------------------------------------

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        pruning = asyncio.create_task(self._prune())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        pruning.cancel()
        await asyncio.gather(*self._writing, return_exceptions=True)
        await self.upstreams.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _prune(self) -> None:
        """Delete old records also while none are added."""
        while True:
            for directory in tenants(self.directory):
                records = Records(directory, self.retention)
                try:
                    await asyncio.to_thread(records.prune, self.clock())
                except (OSError, UserError) as error:
                    log.error("cannot delete old records in %s: %s", directory, error)
            await asyncio.sleep(PRUNE_SECONDS)


class _Copy:
    """A copy of an answer, if it is to be recorded. tenant: None: it is not."""

    def __init__(self, tenant: str | None, response: httpx2.Response) -> None:
        kind = response.headers.get("content-type", "").partition(";")[0].strip()
        self.stream = kind == "text/event-stream"
        plain = response.headers.get("content-encoding", "identity") == "identity"
        fits = response.status_code == 200 and plain
        self.tenant = tenant if fits and (self.stream or kind == "application/json") else None
        self.answer = bytearray()

    def add(self, piece: bytes) -> None:
        if self.tenant is not None:
            self.answer += piece
            if len(self.answer) > LONGEST_ANSWER:
                self.tenant = None


async def _read_body(receive: Receive) -> bytes:
    """The body of a request, or the beginning of one that is longer than LONGEST_BODY. Raises
    ClientDisconnect if the client leaves before its end."""
    body = bytearray()
    while len(body) <= LONGEST_BODY:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    return bytes(body)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _nothing() -> Any:
    await asyncio.Event().wait()


def _forwarded(
    headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes] = frozenset()
) -> Headers:
    """The headers of a message without those of the connection and those that are dropped."""
    headers = [(name.lower(), value) for name, value in headers]
    listed = b",".join(value for name, value in headers if name == b"connection")
    gone = HOP | dropped | {name.strip().lower() for name in listed.split(b",")}
    return [(name, value) for name, value in headers if name not in gone]


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refuse(status: int, message: str) -> JSONResponse:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return error_response(status, message, kind)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False
