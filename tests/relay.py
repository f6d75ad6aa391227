"""A relay on loopback between an edge and a verification server: delay and faults.

It forwards WebSocket frames, so it can tell one message from another.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from draftsmith.net.listen import bind

# pass it on; cut the line before or after it is passed on; pass it on twice; hold it, and all after
# it, for some time.
Fate = Literal["pass", "cut before", "cut after", "twice", "stall"]
ChooseFate = Callable[[bytes, bool], Fate]


class Relay:
    """Forwards connections to a server on this machine. Use it as a context.

    port: of the server, which may change. rtt: seconds of a round trip. fate: of a frame, by its
    bytes and whether it goes up to the server. stall: seconds that a stall lasts.

    fates: how many frames met each fate but "pass".
    """

    def __init__(
        self,
        port: int,
        *,
        rtt: float = 0.0,
        fate: ChooseFate = lambda frame, up: "pass",
        stall: float = 1.0,
    ) -> None:
        self.port, self.rtt, self.fate, self.stall = port, rtt, fate, stall
        self.fates: Counter[Fate] = Counter()
        self._loop = asyncio.new_event_loop()
        self._bound = bind("127.0.0.1", 0)
        self._started, self._stopping = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    @property
    def url(self) -> str:
        """Where edges connect."""
        return f"ws://127.0.0.1:{self._bound.getsockname()[1]}"

    def __enter__(self) -> "Relay":
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        async with serve(
            self._forward, sock=self._bound, compression=None, max_size=None, close_timeout=0.2
        ):
            self._started.set()
            await self._stopping.wait()

    async def _forward(self, edge: ServerConnection) -> None:
        request = edge.request
        key = request.headers.get("Authorization") if request else None
        try:
            server = await connect(
                f"ws://127.0.0.1:{self.port}",
                additional_headers={"Authorization": key} if key else {},
                compression=None,
                max_size=None,
                proxy=None,
            )
        except (OSError, InvalidHandshake):
            edge.transport.abort()
            return
        ways = [
            asyncio.create_task(self._pump(edge, server, True)),
            asyncio.create_task(self._pump(server, edge, False)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            edge.transport.abort()
            server.transport.abort()

    async def _pump(self, source: Any, sink: Any, up: bool) -> None:
        """Pass frames on, each at its moment. Ends when the line is to be cut."""
        queue: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue()  # None: the end
        writing = asyncio.create_task(self._write(queue, sink))
        try:
            async for frame in source:
                fate = self.fate(frame, up)
                if fate != "pass":
                    self.fates[fate] += 1
                if fate == "cut before":
                    queue.put_nowait((0.0, None))
                    await writing
                    return
                if fate == "stall":
                    await asyncio.sleep(self.stall)
                due = time.monotonic() + self.rtt / 2
                for _ in range(2 if fate == "twice" else 1):
                    queue.put_nowait((due, frame))
                if fate == "cut after":
                    queue.put_nowait((due, None))
                    await writing
                    return
        except ConnectionClosed:
            return
        finally:
            writing.cancel()

    async def _write(self, queue: "asyncio.Queue[tuple[float, bytes | None]]", sink: Any) -> None:
        while True:
            due, frame = await queue.get()
            wait = due - time.monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
            if frame is None:
                return
            try:
                await sink.send(frame)
            except ConnectionClosed:
                return
