"""The page at `/`, and the live figures that it plots."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from draftsmith.serve.batching.request_batcher import RequestBatcher
from draftsmith.serve.openai.answers import event
from draftsmith.serve.static_files import FILES, file_routes

_STATIC = Path(__file__).parent / "static"
# No secrets are in these files, and without them nobody could enter a key.
OPEN_PATHS = frozenset({"/health", *FILES})
_LIVE_SECONDS = 0.5


def page_routes(batcher: RequestBatcher) -> list[Route]:
    """The files of the page, and `/live`: the figures of the batcher twice a second, as server-sent
    events."""

    async def live(request: Request) -> Response:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(_figures(batcher), media_type="text/event-stream", headers=headers)

    routes = file_routes(_STATIC)
    return [*routes, Route("/live", live, methods=["GET"])]


async def _figures(batcher: RequestBatcher) -> AsyncIterator[bytes]:
    while batcher.alive:
        yield event({"seconds": round(time.monotonic(), 3), **batcher.live()})
        await asyncio.sleep(_LIVE_SECONDS)
