"""A proxy that passes bytes on untouched, and records the answers that may be recorded.

It is one ASGI application: routes would have to know every path of every engine. It reads a request
completely, sends it on, and passes the answer on piece by piece. A copy of a recorded answer is
read at its end. Recording can fail; the answer has then been passed on all the same.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from decode.base.errors import UserError
from draftsmith.learn.record.consent import Keys
from draftsmith.learn.record.kept_answers import NotRecorded, exchanges
from draftsmith.learn.record.records import Records, Retention, make_record, tenants
from draftsmith.learn.record.upstream import Upstream, Upstreams
from draftsmith.net.access import LOCAL, Guard, error_response, ip_address, media_type
from draftsmith.net.hang_up import unless_hung_up

CHAT = "/v1/chat/completions"
ADMIN = "/admin/upstream"
LONGEST_BODY = 64 << 20  # bytes of a request; images are sent in bodies
LONGEST_ANSWER = 16 << 20  # bytes of an answer that can be recorded
LONGEST_RECORDED = 4 << 20  # bytes of a request that can be recorded
HELD_BYTES = 512 << 20  # of bodies and copies of answers, over all requests
LOGGED_REASONS = 100  # different reasons against recording that are counted apart
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
class RecordingProxy:
    """The application. directory: the directory of the tenants' directories. clock: seconds since
    1970.
    guard: who may call. Without an admin_key the upstream cannot be switched."""

    upstreams: Upstreams
    directory: Path
    keys: Keys
    retention: Retention
    clock: Callable[[], float]
    guard: Guard = LOCAL
    counts: Counter[str] = field(default_factory=Counter)  # recorded, and reasons against it
    _held: "_Held" = field(default_factory=lambda: _Held())
    _writing: set["asyncio.Future[None]"] = field(default_factory=set)
    # One thread: recording many answers takes no more time from the proxy than recording one.
    _writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "record"))

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
        held = _Held(self._held)
        try:
            body = await _read_body(scope, receive, held)
            upstream = self.upstreams.current
            upstream.in_flight += 1
            try:
                # An answer that the client no longer waits for is cancelled, which closes the
                # connection to the engine: it sees the hang-up.
                await unless_hung_up(receive, self._answer(upstream, scope, body, send, held))
            finally:
                upstream.in_flight -= 1
                await self.upstreams.close_idle()
        except ClientDisconnect:
            pass
        except _Unfit as unfit:
            await _refuse(unfit.status, str(unfit))(scope, receive, send)
        finally:
            held.leave()

    async def _answer(
        self, upstream: Upstream, scope: Scope, body: bytes, send: Send, held: "_Held"
    ) -> None:
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
            copy = self._copy(scope, body, response, held)
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            async for piece in response.stream:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                if copy is not None and not copy.add(piece):
                    self._leave_out("the answer is too long, or too much is held")
                    copy = None
            # Before the end is sent: with it the server reports a hang-up, which cancels this task.
            if copy is not None:
                self._write(copy, held)
            await send({"type": "http.response.body"})
        except httpx2.TransportError as error:
            # The server sees that the answer has no end, and closes the client's connection.
            log.warning("%s broke off an answer: %s", upstream.url, _reason(error))
        finally:
            await response.aclose()

    # --- recording --------------------------------------------------------------------------------

    def _copy(
        self, scope: Scope, body: bytes, response: httpx2.Response, held: "_Held"
    ) -> "_Copy | None":
        """The copy of an answer. None: it is not recorded."""
        if scope["method"] != "POST" or not scope["path"].endswith(CHAT):
            return None
        headers = dict(scope["headers"])
        try:
            asked = _asked(headers, body)
            sent = headers.get(b"authorization", b"").decode("latin-1")
            tenant = self.keys.tenant_of(sent, asked)
            return None if tenant is None else _Copy(tenant, asked, _is_stream(response), held)
        except NotRecorded as reason:
            self._leave_out(str(reason))
            return None

    def _leave_out(self, reason: str, count: int = 1) -> None:
        """Count an answer that is not recorded, and log the first one for each reason."""
        if reason not in self.counts and len(self.counts) > LOGGED_REASONS:
            reason = "other reasons"
        if not self.counts[reason]:
            log.warning("not recorded: %s; GET %s counts such answers", reason, ADMIN)
        self.counts[reason] += count

    def _write(self, copy: "_Copy", held: "_Held") -> None:
        held.writing = True
        loop = asyncio.get_running_loop()
        writing = loop.run_in_executor(self._writer, self._record, copy)
        self._writing.add(writing)

        def done(writing: "asyncio.Future[None]") -> None:
            self._writing.discard(writing)
            held.writing = False
            held.leave()

        writing.add_done_callback(done)

    def _record(self, copy: "_Copy") -> None:
        asked = copy.asked
        user = asked.get("safety_identifier") or asked.get("user")
        name = user if isinstance(user, str) else None
        records = Records(self.directory / copy.tenant, self.retention)
        try:
            found, left_out = exchanges(asked, bytes(copy.answer), stream=copy.stream)
            for reason, count in left_out.items():
                self._leave_out(reason, count)
            for exchange in found:
                records.append(make_record(exchange, name, self.clock()))
                self.counts["recorded"] += 1
        except NotRecorded as reason:
            self._leave_out(str(reason))
        except UserError as error:
            log.error("%s", error)
            self._leave_out("the record cannot be written")
        except Exception:
            log.exception("an answer cannot be recorded")
            self._leave_out("an error in the recorder")

    # --- the switch -------------------------------------------------------------------------------

    async def _admin(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        if refusal is None and scope["method"] == "POST":
            held = _Held(self._held)
            try:
                asked = _object(await _read_body(scope, receive, held)) or {}
                await self.upstreams.switch(str(asked.get("url", "")))
            except UserError as error:
                refusal = _refuse(400, str(error))
            except _Unfit as unfit:
                refusal = _refuse(unfit.status, str(unfit))
            finally:
                held.leave()
        described = self.upstreams.describe() | {"records": dict(self.counts)}
        response = refusal or JSONResponse(described)
        await response(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        address = ip_address(scope["client"][0]) if scope.get("client") else None
        if self.guard.admin_key is None or address is None or not address.is_loopback:
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


class _Unfit(Exception):
    """A request that is not passed on."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Held:
    """The bytes of a request that are in memory: its body, and the copy of its answer. all: those
    of all requests. writing: the thread that records still needs them."""

    def __init__(self, all: "_Held | None" = None) -> None:
        self.all, self.bytes, self.writing = all or self, 0, False

    def take(self, count: int) -> bool:
        """Hold more, unless that is too much."""
        if self.all.bytes + count > HELD_BYTES:
            return False
        self.bytes += count
        self.all.bytes += count
        return True

    def leave(self) -> None:
        """Nothing is held any more, unless it is still recorded."""
        if not self.writing:
            self.all.bytes -= self.bytes
            self.bytes = 0


@dataclass
class _Copy:
    """A copy of an answer that is to be recorded. asked: the request. stream: it has events."""

    tenant: str
    asked: dict[str, Any]
    stream: bool
    held: _Held
    answer: bytearray = field(default_factory=bytearray)

    def add(self, piece: bytes) -> bool:
        """Append to it. False: it is too long."""
        fits = len(self.answer) + len(piece) <= LONGEST_ANSWER and self.held.take(len(piece))
        if fits:
            self.answer += piece
        return fits


def _asked(headers: dict[bytes, bytes], body: bytes) -> dict[str, Any]:
    """The request that a body holds. Raises NotRecorded."""
    if media_type(headers.get(b"content-type", b"").decode("latin-1")) != "application/json":
        raise NotRecorded("the content type of the request is not application/json")
    if len(body) > LONGEST_RECORDED:
        raise NotRecorded(f"the request is longer than {LONGEST_RECORDED:,} bytes")
    asked = _object(body)
    if asked is None:
        raise NotRecorded("the request is no JSON object")
    return asked


def _is_stream(response: httpx2.Response) -> bool:
    """Whether an answer has events. Raises NotRecorded for one that has no text."""
    kind = media_type(response.headers.get("content-type", ""))
    if response.status_code != 200:
        raise NotRecorded("the status of the answer is not 200")
    if response.headers.get("content-encoding", "identity") != "identity":
        raise NotRecorded("the answer is compressed; let clients or the engine not ask for that")
    if kind not in ("text/event-stream", "application/json"):
        raise NotRecorded("the content type of the answer is neither JSON nor a stream of events")
    return kind == "text/event-stream"


async def _read_body(scope: Scope, receive: Receive, held: _Held) -> bytes:
    """The body of a request. Raises _Unfit for a request that cannot be passed on, and
    ClientDisconnect if the client leaves before its end."""
    names = [name for name, _ in scope["headers"]]
    if b"content-length" in names and b"transfer-encoding" in names:
        raise _Unfit(400, "the request has Content-Length and Transfer-Encoding; send one of them")
    if not (scope.get("raw_path") or b"/").startswith((b"/", b"*")):
        raise _Unfit(400, "the target of the request is an address; expected a path")
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        if len(body) + len(part) > LONGEST_BODY:
            raise _Unfit(413, f"the body is longer than {LONGEST_BODY:,} bytes; shorten it")
        if not held.take(len(part)):
            raise _Unfit(503, "the bodies of other requests fill the memory; try again")
        body += part
        if not message.get("more_body", False):
            return bytes(body)


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
