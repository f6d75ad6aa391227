"""Work for a client, until it hangs up."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import anyio
from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def unless_hung_up(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`. Raises ClientDisconnect as soon as the client hangs up; the work has
    then been cancelled. receive: of a request whose body has been read.

    The scope is anyio's, not a cancelled task of asyncio. HTTP clients shield the closing of their
    connections from such a scope alone, and a connection that is not closed stays open for good.
    """
    with anyio.CancelScope() as scope:

        async def hang_up() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            scope.cancel()

        watching = asyncio.ensure_future(hang_up())
        try:
            return await work
        finally:
            watching.cancel()
    raise ClientDisconnect
