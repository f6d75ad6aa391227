"""The connections of a server: how many there are, and how long each may let the server wait.

A connection either works for its client, or waits for it: for headers, for a body, for a message,
or until the client has read what was sent. While it works it is never cut. While it waits it has a
time limit, and it is the first to go when another client needs the room.
"""

import asyncio
import time
from asyncio import Transport
from collections.abc import Hashable
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from draftsmith.net.api_error import ApiError
from draftsmith.net.limits import CLIENT_SPARE, SPARE, ServerLimits
from draftsmith.net.pace import Pace
from draftsmith.net.pool import Place, Pool, client_of

HEALTH = "/health"
UNREAD = "unread"
_LOOKS = 30  # at a client that does not read, until its connection is cut
_ROOM_SECONDS = 0.02  # between two looks for room
# A new connection keeps its place for so long: its first request may have arrived, and is not read.
_NEW_SECONDS = 0.1
# Connections that are accepted before those that are open are served again: a process that runs out
# of files accepts nobody for a second. The system keeps more of them.
ACCEPTED_AT_ONCE, BACKLOG = 64, 2048


class Wait(NamedTuple):
    """What a connection waits for. step: differs between two waits of one connection. seconds: how
    long it may take; None: others see to that."""

    step: Hashable
    seconds: float | None


class Door:
    """All connections of one server."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self.inside = Pool(limits.connections, limits.client_connections)
        self.spare = Pool(SPARE, CLIENT_SPARE)
        self._paces: WeakValueDictionary[str, Pace] = WeakValueDictionary()

    def pace_of(self, client: str) -> Pace:
        """Of the frames of a client, shared by its connections while it has any."""
        return self._paces.setdefault(client, Pace(self.limits.client_frames))


class Watched(asyncio.Protocol):
    """A connection that is watched: a class to be mixed into a protocol of HTTP or WebSockets.

    door: of its server. spare: there is no room for it yet; until then it serves `HEALTH` alone.
    pace: of its client's frames.
    """

    door: Door
    spare = False
    _is_new = True
    _wait: Wait | None = None
    _timer: asyncio.TimerHandle | None = None
    _paused = False  # much is sent that the client has not read
    _unread = 0  # bytes, when the timer was set
    _stuck = 0  # looks since the client has last read something

    def waits_for(self) -> Wait | None:
        """What the client has to do next. None: the server has to do something."""
        raise NotImplementedError

    def connection_made(self, transport: Any) -> None:
        self._transport: Transport = transport
        peer = transport.get_extra_info("peername")
        client = client_of(peer[0]) if isinstance(peer, tuple) else ""
        self._pool, self._place = self.door.inside, Place(client, transport.abort)
        self.pace = self.door.pace_of(client)
        if not self._pool.take(self._place):
            self.spare, self._pool = True, self.door.spare
            self._pool.take(self._place)  # all others there are idle, so there is room
        asyncio.get_running_loop().call_later(_NEW_SECONDS, self._age)
        super().connection_made(transport)
        self.look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.leave(self._place)
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._paused = True
        self.look()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._paused = False
        self.look()

    async def require_room(self) -> None:
        """Wait until there is room for a spare connection. Raises ApiError if that takes long."""
        end = time.monotonic() + self.door.limits.header_seconds
        place = Place(self._place.client, self._transport.abort)
        while self.spare and not self.door.inside.take(place):
            if time.monotonic() > end:
                message = "too many connections are open; try again later"
                close = {"connection": "close"}
                raise ApiError(503, message, code="full", retry_after=1, headers=close)
            await asyncio.sleep(_ROOM_SECONDS)
        if not self.spare:
            return
        self._pool.leave(self._place)
        self.spare, self._pool, self._place = False, self.door.inside, place
        if self._transport.is_closing():
            self._pool.leave(place)
        else:
            self._file()

    def look(self) -> None:
        """Find out what the connection waits for."""
        wait = self._found()
        if wait == self._wait:
            return
        self._wait, self._stuck = wait, 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._file()
        if wait is not None:
            self._set(wait)

    def _found(self) -> Wait | None:
        wait, transport = self.waits_for(), self._transport
        # A connection that is closed stays open until the client has read what was sent.
        unread = wait is not None and transport.get_write_buffer_size()
        if self._paused or unread or transport.is_closing():
            return Wait(UNREAD, self.door.limits.unread_seconds / _LOOKS)
        return wait

    def _file(self) -> None:
        """Tell the pool whether the connection waits. A client that reads slowly is no such one,
        and one that has stopped reading goes after all others."""
        reads = self._wait is None or (self._wait.step == UNREAD and not self._stuck)
        works = (reads or self._is_new) and not self.spare
        self._pool.file(self._place, None if works else min(self._stuck, 1))

    def _age(self) -> None:
        self._is_new = False
        self._file()

    def _set(self, wait: Wait) -> None:
        self._unread = self._transport.get_write_buffer_size()
        if wait.seconds is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(wait.seconds, self._late, wait)

    def _late(self, wait: Wait) -> None:
        self._timer = None
        self.look()
        if self._wait != wait:
            return
        left = self._transport.get_write_buffer_size()
        if wait.step == UNREAD and (left < self._unread or self._stuck + 1 < _LOOKS):
            self._stuck = 0 if left < self._unread else self._stuck + 1
            self._file()
            self._set(wait)
        else:
            self._transport.abort()
