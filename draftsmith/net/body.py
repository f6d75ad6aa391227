"""Bodies of requests, whose memory and time are bounded."""

import asyncio

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from draftsmith.net.api_error import ApiError
from draftsmith.net.limits import ServerLimits
from draftsmith.net.pool import Place, Pool, client_of


class BodyMemory:
    """The memory of a server for what its requests hold."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self.pool = Pool(limits.body_bytes, limits.client_body_bytes)


class Held:
    """The bytes of one request that are in memory, until `leave`."""

    def __init__(self, memory: BodyMemory, scope: Scope) -> None:
        self._memory = memory
        client = client_of((scope.get("client") or ("",))[0])
        self._place = Place(client, self._drop)
        self._dropped = False
        self._limit: asyncio.Timeout | None = None

    def take_free(self, count: int) -> bool:
        """Hold more, unless other requests need the memory."""
        pool = self._memory.pool
        return pool.fits(self._place.client, count) and pool.take(self._place, count)

    def leave(self) -> None:
        """Nothing is held any more."""
        self._memory.pool.leave(self._place)

    async def read(self, scope: Scope, receive: Receive, longest: int) -> bytes:
        """The body of a request. longest: in bytes; a body that says that it is longer is not read.

        Raises ApiError with status 413 for one that is longer, 408 for one that comes too slowly,
        and 503 if other bodies need the memory; ClientDisconnect if the client leaves.
        """
        if int(dict(scope["headers"]).get(b"content-length", 0)) > longest:
            raise self._too_long(longest)
        limits, loop = self._memory.limits, asyncio.get_running_loop()
        begun, allowed, body, more = loop.time(), limits.body_seconds, bytearray(), True
        self._memory.pool.file(self._place, 0)
        try:
            async with asyncio.timeout(limits.body_seconds) as self._limit:
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    part = message.get("body", b"")
                    if len(body) + len(part) > longest:
                        raise self._too_long(longest)
                    if self._dropped or not self._memory.pool.take(self._place, len(part)):
                        raise self._full()
                    body += part
                    more = message.get("more_body", False)
                    allowed = limits.body_seconds + len(body) / limits.body_rate
                    self._limit.reschedule(begun + allowed)
        except TimeoutError:
            if self._dropped:
                raise self._full() from None
            late = f"the body did not arrive in {allowed:.0f} s"
            raise ApiError(408, f"{late}; send it faster, or in parts") from None
        finally:
            self._limit = None
        self._memory.pool.file(self._place, None)
        return bytes(body)

    def _drop(self) -> None:
        self._dropped = True
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())

    @staticmethod
    def _too_long(longest: int) -> ApiError:
        return ApiError(413, f"the body is longer than {longest:,} bytes; shorten it")

    @staticmethod
    def _full() -> ApiError:
        message = "the bodies of other requests fill the memory; try again"
        return ApiError(503, message, code="memory", retry_after=1)
