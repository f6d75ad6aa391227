"""The WebSocket around a verifier: connections, keys, limits on frames."""

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import DATA_OPCODES
from websockets.http11 import Request, Response
from websockets.protocol import State

from draftsmith.edge.protocol import FRAME_BYTES
from draftsmith.edge.verifier import Verifier
from draftsmith.net.access import LOCAL, Guard, Paths
from draftsmith.net.api_error import ApiError
from draftsmith.net.connections import ACCEPTED_AT_ONCE, BACKLOG, HEALTH, Door, Wait, Watched
from draftsmith.net.limits import ServerLimits
from draftsmith.net.pool import client_of, trusted_proxies

# Edges connect to `/`. Everything else asks for the key too.
PATHS = Paths({HEALTH: "it says that the server runs, and nothing else"})
EDGES = "/"

# Frames that wait for the verifier. If there are more, the next ones stay in their sockets.
WAITING_FRAMES = 32
# Answers that an edge has not read. If there are more, the line ends.
UNREAD_FRAMES = 1024
POLICY_VIOLATION = 1008
# Bytes that are read at once. A frame may have six, and hundreds of them take as long as a verdict.
PIECE_BYTES = 1024
# A frame counts once more for each of these: 12,000 token ids of a byte take some 3 ms.
COUNTED_BYTES = 256


class EdgeConnection(Watched, ServerConnection):
    """One connection of HTTP that becomes a WebSocket.

    Frames of every kind are read at the pace of the client, messages as the verifier takes them,
    and nothing between a request and its answer. What came earlier waits here, and then in the
    socket."""

    _messages = 0
    _begun = False  # a message in parts, of which the last is missing
    _rest: asyncio.TimerHandle | None = None

    def __init__(self, door: Door, *parts: Any, **settings: Any) -> None:
        self.door, self._unread_bytes = door, bytearray()
        super().__init__(*parts, **settings)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.recv_messages.resume = self.read_on

    def connection_lost(self, exc: Exception | None) -> None:
        self._unread_bytes.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unread_bytes += data
        self.read_on()

    def read_on(self) -> None:
        """Read what waits here, as far as it may be read."""
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        while self._unread_bytes and not self._is_held:
            if wait := self.pace.wait():
                self._rest = self.loop.call_later(wait, self.read_on)
                break
            size = PIECE_BYTES
            if self.request is None and self.protocol.handshake_exc is None:
                # The end of a request is the end of a line.
                size = self._unread_bytes.find(b"\n", 0, size) + 1 or size
            piece = bytes(self._unread_bytes[:size])
            del self._unread_bytes[:size]
            super().data_received(piece)
        if self._unread_bytes or self.recv_messages.paused:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    @property
    def _is_held(self) -> bool:
        protocol = self.protocol
        unanswered = protocol.state is State.CONNECTING and not protocol.eof_sent
        return self.recv_messages.paused or (self.request is not None and unanswered)

    def waits_for(self) -> Wait | None:
        limits = self.door.limits
        if self.protocol.state is State.CONNECTING or not self._messages:
            return Wait("first message", limits.header_seconds)
        if self._begun or self.protocol.reader.buffer:
            return Wait(("message", self._messages), limits.body_seconds)
        return Wait(("line", self._messages), None)

    def process_event(self, event: Any) -> None:
        super().process_event(event)
        opcode = getattr(event, "opcode", None)
        if opcode is not None:
            self.pace.take(1 + len(event.data) // COUNTED_BYTES)
        if opcode in DATA_OPCODES:
            self._begun = not event.fin
            self._messages += event.fin


class LinkedEdge:
    """A connection, for the verifying thread. caller: the edge's address."""

    def __init__(self, socket: ServerConnection, caller: str) -> None:
        self.client = client_of(caller)
        self.socket, self._loop = socket, asyncio.get_running_loop()
        self._outbox: asyncio.Queue[bytes | None] = asyncio.Queue()

    def send(self, frame: bytes) -> None:
        self._put(frame)

    def close(self) -> None:
        self._put(None)

    def _put(self, frame: bytes | None) -> None:
        with contextlib.suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(self._add, frame)

    def _add(self, frame: bytes | None) -> None:
        if self._outbox.qsize() < UNREAD_FRAMES:
            self._outbox.put_nowait(frame)
        else:
            self.socket.transport.abort()

    async def write(self) -> None:
        """Send what the verifier gives, until it closes the line or the line is broken."""
        try:
            while (frame := await self._outbox.get()) is not None:
                await self.socket.send(frame)
            await self.socket.close(POLICY_VIOLATION)
        except ConnectionClosed:
            return


class VerifyServer:
    """Listens on a bound socket, in the thread that calls `run`.

    guard: which edges may connect, and what key they send. limits: of connections.
    """

    def __init__(
        self,
        verifier: Verifier,
        bound: socket.socket,
        guard: Guard = LOCAL,
        limits: ServerLimits | None = None,
    ) -> None:
        self.verifier = verifier
        self._bound, self._guard = bound, replace(guard, paths=PATHS)
        self._door = Door(limits or ServerLimits())
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None

    def run(self, listening: Callable[[], None] = lambda: None, *, signals: bool = False) -> None:
        """Serve until `stop`. listening: called when edges can connect. signals: SIGTERM and Ctrl-C
        stop it. If the verifying thread fails, the server ends too, and raises its error: who
        started the process can start it again, and the edges go on."""
        try:
            asyncio.run(self._serve(listening, signals))
        finally:
            self.verifier.end()

    def stop(self) -> None:
        """End, from any thread."""
        if self._loop is not None and self._stopping is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stopping.set)

    async def _serve(self, listening: Callable[[], None], signals: bool) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT) if signals else ():
            # The loop's own handlers exist on Linux and macOS alone.
            signal.signal(number, lambda *_: self.stop())
        async with serve(
            self._connect,
            sock=self._bound,
            max_size=FRAME_BYTES,
            max_queue=1,
            compression=None,
            process_request=self._let_in,
            create_connection=partial(EdgeConnection, self._door),  # type: ignore[arg-type]
            open_timeout=None,  # the connection has its own
            close_timeout=1,
            backlog=ACCEPTED_AT_ONCE,
        ):
            self._bound.listen(BACKLOG)
            listening()
            self.verifier.done.add_done_callback(lambda done: self.stop())
            await self._stopping.wait()

    async def _let_in(self, connection: ServerConnection, request: Request) -> Response | None:
        assert isinstance(connection, EdgeConnection)
        response = await self._refusal(connection, request)
        # The answer is sent before anything else runs here.
        asyncio.get_running_loop().call_soon(connection.read_on)
        return response

    async def _refusal(self, connection: EdgeConnection, request: Request) -> Response | None:
        """The answer to a request that does not become a WebSocket. None: it does."""
        path = request.path.partition("?")[0]
        fault = self._guard.fault("GET", path, request.headers.raw_items())
        if fault is None and path == HEALTH:
            return _json(connection, 200, {"status": "ok"})
        if fault is None and path != EDGES:
            fault = ApiError(404, f"edges connect to {EDGES}, and nothing else is here")
        if fault is None:
            try:
                await connection.require_room()
            except ApiError as error:
                fault = error
        return None if fault is None else _json(connection, fault.status, fault.body)

    async def _connect(self, socket: ServerConnection) -> None:
        line = LinkedEdge(socket, await _caller(socket))
        writing = asyncio.create_task(line.write())
        try:
            async for frame in socket:
                self.verifier.put(line, frame)
                while self.verifier.waiting > WAITING_FRAMES:
                    await asyncio.sleep(0.001)
        except ConnectionClosed:
            pass
        finally:
            self.verifier.put(line, None)
            writing.cancel()


async def _caller(socket: ServerConnection) -> str:
    """The address of an edge, by the words of the proxies that are believed, as uvicorn reads
    them."""
    told = socket.request.headers.get_all("X-Forwarded-For") if socket.request else []
    headers = [(b"x-forwarded-for", one.encode(errors="surrogateescape")) for one in told]
    scope: Any = {"type": "websocket", "client": socket.remote_address[:2], "headers": headers}

    async def nothing(*_: Any) -> None:
        pass

    await ProxyHeadersMiddleware(nothing, trusted_proxies())(scope, nothing, nothing)  # type: ignore[arg-type]
    return str(scope["client"][0])


def _json(connection: ServerConnection, status: int, body: dict[str, Any]) -> Response:
    response = connection.respond(status, json.dumps(body))
    del response.headers["content-type"]
    response.headers["content-type"] = "application/json"
    return response
