"""A proxy that passes bytes on untouched, and records the answers that may be recorded.

It is one ASGI application: routes would have to know every path of every engine. It reads a request
completely, sends it on, and passes the answer on piece by piece. A copy of a recorded answer is
read at its end. Recording can fail; the answer has then been passed on all the same.
"""

import asyncio
import json
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
from draftsmith.net.access import LOCAL, Guard, Paths, ip_address, media_type
from draftsmith.net.api_error import ApiError
from draftsmith.net.body import BodyMemory, Held
from draftsmith.net.few_lines import server_logger
from draftsmith.net.hang_up import unless_hung_up
from draftsmith.net.limits import ServerLimits

CHAT = "/v1/chat/completions"
ADMIN = "/admin/upstream"
PATHS = Paths(
    admin=frozenset({ADMIN}), others="they go on to the engine, which asks for its own key"
)
LONGEST_BODY = 64 << 20  # bytes of a request; images are sent in bodies
LONGEST_SWITCH = 1 << 16  # bytes of a request for another engine
LONGEST_ANSWER = 16 << 20  # bytes of an answer that can be recorded
LONGEST_RECORDED = 4 << 20  # bytes of a request that can be recorded
# Of bodies and copies of answers.
LIMITS = ServerLimits(body_bytes=512 << 20, client_body_bytes=128 << 20)
LOGGED_REASONS = 100  # different reasons against recording that are counted apart
PRUNE_SECONDS = 600.0
# These belong to one connection and not to a message (RFC 9110, 7.6.1).
HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade".split()
)
# Our server has answered `expect`, and the client's request writes the host of the engine.
OURS = frozenset((b"host", b"expect"))
# What proxies add. A caller behind one is another machine's, whatever its address is.
PROXIED = {b"x-forwarded-for", b"forwarded", b"via"}

log = server_logger("draftsmith.record")
Headers = list[tuple[bytes, bytes]]


@dataclass
class RecordingProxy:
    """The application. directory: the directory of the tenants' directories. clock: seconds since
    1970.
    guard: who may call. Without an admin_key the upstream cannot be switched. limits: of clients.
    """

    upstreams: Upstreams
    directory: Path
    keys: Keys
    retention: Retention
    clock: Callable[[], float]
    guard: Guard = LOCAL
    counts: Counter[str] = field(default_factory=Counter)  # recorded, and reasons against it
    limits: ServerLimits = LIMITS
    _writing: set["asyncio.Future[None]"] = field(default_factory=set)
    # One thread: recording many answers takes no more time from the proxy than recording one.
    _writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "record"))

    def __post_init__(self) -> None:
        self._memory = BodyMemory(self.limits)

    def guarded(self) -> ASGIApp:
        """The application behind its guard. An engine takes bodies of other types than JSON."""
        return replace(self.guard, json=False, paths=PATHS).around(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["path"] == ADMIN:
            await self._admin(scope, receive, send)
        else:
            await self._pass_on(scope, receive, send)

    # --- answers ----------------------------------------------------------------------------------

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = _Holding(self._memory, scope)
        try:
            self._require_fit(scope)
            body = await held.read(scope, receive, LONGEST_BODY)
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
        except ApiError as error:
            await error.response()(scope, receive, send)
        finally:
            held.leave()

    def _require_fit(self, scope: Scope) -> None:
        """Raise ApiError for a request that is not passed on."""
        headers = dict(scope["headers"])
        if b"content-length" in headers and b"transfer-encoding" in headers:
            message = "the request has Content-Length and Transfer-Encoding; send one of them"
            raise ApiError(400, message)
        if not (scope.get("raw_path") or b"/").startswith((b"/", b"*")):
            raise ApiError(400, "the target of the request is an address; expected a path")
        # Other APIs have other headers for a key, and a header may come twice.
        sent = [value for _, value in scope["headers"]]
        sent += [scope["query_string"], scope.get("raw_path") or scope["path"].encode()]
        if self.guard.shows_admin_key(sent):
            message = f"this key is for {ADMIN} alone and is not passed on; send the engine's key"
            raise ApiError(403, message, code="admin_key_not_passed_on")

    async def _answer(
        self, upstream: Upstream, scope: Scope, body: bytes, send: Send, held: "_Holding"
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
            await ApiError(502, message).response()(scope, _nothing, send)
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
        self, scope: Scope, body: bytes, response: httpx2.Response, held: "_Holding"
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

    def _write(self, copy: "_Copy", held: "_Holding") -> None:
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
        held = Held(self._memory, scope)
        try:
            self._require_here(scope)
            if scope["method"] == "POST":
                asked = _object(await held.read(scope, receive, LONGEST_SWITCH)) or {}
                await self.upstreams.switch(str(asked.get("url", "")))
            response = JSONResponse(self.upstreams.describe() | {"records": dict(self.counts)})
        except ClientDisconnect:
            return
        except UserError as error:
            response = ApiError(400, str(error)).response()
        except ApiError as error:
            response = error.response()
        finally:
            held.leave()
        await response(scope, receive, send)

    def _require_here(self, scope: Scope) -> None:
        """Raise ApiError for a caller that may not switch."""
        address = ip_address(scope["client"][0]) if scope.get("client") else None
        told = {name for name, _ in scope["headers"]} & PROXIED
        if self.guard.admin_key is None or told or address is None or not address.is_loopback:
            raise ApiError(404, f"{ADMIN} is off, or is open only to this machine")
        if scope["method"] not in ("GET", "POST"):
            raise ApiError(405, f"{ADMIN} takes GET and POST")

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


class _Holding(Held):
    """What a request holds: its body, and the copy of its answer. writing: the thread that records
    still needs them."""

    writing = False

    def leave(self) -> None:
        if not self.writing:
            super().leave()


@dataclass
class _Copy:
    """A copy of an answer that is to be recorded. asked: the request. stream: it has events."""

    tenant: str
    asked: dict[str, Any]
    stream: bool
    held: Held
    answer: bytearray = field(default_factory=bytearray)

    def add(self, piece: bytes) -> bool:
        """Append to it. False: it is too long."""
        fits = len(self.answer) + len(piece) <= LONGEST_ANSWER and self.held.take_free(len(piece))
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


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
