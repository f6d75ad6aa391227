"""Work for a client, until it hangs up."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def unless_hung_up(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`. Raises ClientDisconnect as soon as the client hangs up; the work has
    then been cancelled. receive: of a request whose body has been read."""

    async def hang_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    result, gone = asyncio.ensure_future(work), asyncio.ensure_future(hang_up())
    try:
        await asyncio.wait({result, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise ClientDisconnect
        return result.result()
    finally:
        for task in (result, gone):
            task.cancel()
        await asyncio.gather(result, gone, return_exceptions=True)
