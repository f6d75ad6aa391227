"""The WebSocket around a verifier: connections, keys, limits on frames."""

import asyncio
import contextlib
import http
import signal
import socket
from collections.abc import Callable

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from draftsmith.edge.protocol import FRAME_BYTES
from draftsmith.edge.verifier import Verifier
from draftsmith.net.access import LOCAL, Guard

# Frames that wait for the verifier. If there are more, the next ones stay in their sockets.
WAITING_FRAMES = 256
# Answers that an edge has not read. If there are more, the line ends.
UNREAD_FRAMES = 1024
POLICY_VIOLATION = 1008


class Line:
    """A connection, for the verifying thread."""

    def __init__(self, socket: ServerConnection) -> None:
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

    guard: which edges may connect, and what key they send.
    """

    def __init__(self, verifier: Verifier, bound: socket.socket, guard: Guard = LOCAL) -> None:
        self.verifier = verifier
        self._bound, self._guard = bound, guard
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
            self._loop.add_signal_handler(number, self._stopping.set)
        async with serve(
            self._connect,
            sock=self._bound,
            max_size=FRAME_BYTES,
            compression=None,
            process_request=self._let_in,
            close_timeout=1,
        ):
            listening()
            self.verifier.done.add_done_callback(lambda done: self.stop())
            await self._stopping.wait()

    def _let_in(self, connection: ServerConnection, request: Request) -> Response | None:
        fault = self._guard.fault("GET", request.path, request.headers.raw_items())
        if fault is None:
            return None
        return connection.respond(http.HTTPStatus(fault.status), fault.message + "\n")

    async def _connect(self, socket: ServerConnection) -> None:
        line = Line(socket)
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
