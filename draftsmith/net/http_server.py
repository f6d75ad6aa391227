"""The HTTP server around an application of this package."""

import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from draftsmith.net.api_error import ApiError
from draftsmith.net.connections import ACCEPTED_AT_ONCE, BACKLOG, HEALTH, Door, Wait, Watched
from draftsmith.net.few_lines import server_logger
from draftsmith.net.limits import ServerLimits
from draftsmith.net.pool import trusted_proxies

# Of connections. A request that cannot be read is answered with 400, and no line: a client could
# fill the log. A filter stays when uvicorn sets up its loggers; a level does not.
_LOG = server_logger("uvicorn.error.connections")
_LOG.addFilter(lambda record: record.levelno >= logging.ERROR)
# Parts of a body in one read. More cost the event loop more time than their bytes are worth.
_PARTS, _BYTES_PER_PART = 1024, 96
# Bytes to a line end, of which each part has two. Fewer are so many parts that none is read.
_BYTES_PER_END = 8


class HttpServer(uvicorn.Server):
    """A server that logs warnings only. Its answers do not name it. It takes no WebSockets.

    closing_seconds: for connections that are open at the end. started_up: called when it listens.
    limits: of its clients. lifespan: auto: the application is told when it begins and ends.
    settings: more of uvicorn's.
    """

    def __init__(
        self,
        app: ASGIApp,
        closing_seconds: int,
        started_up: Callable[[], None] = lambda: None,
        limits: ServerLimits | None = None,
        lifespan: Literal["auto", "off"] = "off",
        **settings: Any,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=partial(_Connection, Door(limits or ServerLimits())),  # type: ignore[arg-type]
            ws="none",
            backlog=ACCEPTED_AT_ONCE,
            lifespan=lifespan,
            log_level="warning",
            server_header=False,
            proxy_headers=bool(trusted_proxies()),
            timeout_graceful_shutdown=closing_seconds,
            **settings,
        )
        super().__init__(config)
        self._started_up = started_up

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for one in sockets or ():
            one.listen(BACKLOG)
        self._started_up()


class _Connection(Watched, H11Protocol):
    """One connection of HTTP/1.1."""

    conn: "_RequestReader"

    def __init__(self, door: Door, **parts: Any) -> None:
        self.door = door
        super().__init__(**parts)
        self.conn, self.logger = _RequestReader(h11.SERVER), _LOG

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self.spare:
            self.app = _Spare(self, self.app)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # A client that sends requests without waiting for answers gets one answer. Else it would
        # work for itself without a pause, and what it has sent would stay in memory.
        if self.conn.is_ahead and self.cycle is not None:
            self.cycle.keep_alive = False

    def waits_for(self) -> Wait | None:
        answered = self.cycle is None or self.cycle.response_complete
        if self.conn.their_state is h11.SEND_BODY:
            # What reads the body has a time limit of its own, and can say why it ends.
            return Wait("rest", self.door.limits.header_seconds) if answered else Wait("body", None)
        return Wait("headers", self.door.limits.header_seconds) if answered else None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.look()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            with suppress(h11.LocalProtocolError):  # an answer to HEAD has no body
                super().send_400_response(msg)
            if self.cycle is not None:  # its application may answer yet
                self.cycle.disconnected = True
                self.cycle.message_event.set()
        # Else the answer to this request has begun.
        self.transport.close()

    def _get_upgrade(self) -> None:
        """Nothing is upgraded to."""


class _RequestReader(h11.Connection):
    """Reads requests, and refuses bodies in very many parts. is_ahead: more follows the request
    that is being answered."""

    is_ahead = False
    _in_parts = False  # the body is chunked
    _crowded = False  # its parts are tiny
    _parts = 0  # that may still come in this read

    def receive_data(self, data: bytes) -> None:
        self._parts = _PARTS + len(data) // _BYTES_PER_PART
        ends = data.count(b"\r\n")
        self._crowded = ends > _PARTS and _BYTES_PER_END * ends > len(data)
        super().receive_data(data)

    def next_event(self) -> Any:
        event = super().next_event()
        self.is_ahead = event is h11.PAUSED
        if isinstance(event, h11.Request):
            self._in_parts = any(name == b"transfer-encoding" for name, _ in event.headers)
        elif isinstance(event, h11.Data) and self._in_parts:
            self._parts -= 1
            if self._crowded or self._parts < 0:
                raise h11.RemoteProtocolError("the body has too many parts")
        return event


class _Spare:
    """The application, for a connection that waits for room."""

    def __init__(self, connection: _Connection, app: Any) -> None:
        self._connection, self._app = connection, app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != HEALTH:
            try:
                await self._connection.require_room()
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)
