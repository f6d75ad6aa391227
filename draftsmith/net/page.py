"""A page: its files, and the live events that it shows. It loads nothing from elsewhere."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from draftsmith.net.events import EVENT_HEADERS
from draftsmith.net.limits import ServerLimits
from draftsmith.net.pool import Place, Pool, client_of

# By path: the file's name and its media type.
FILES = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
    "/favicon.svg": ("favicon.svg", "image/svg+xml"),
}
OPEN = dict.fromkeys(
    FILES, "no secrets are in these files, and without them nobody could enter a key"
)
# Nothing from elsewhere, nothing inline, in no frame.
_POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_routes(
    folder: Path, event: Callable[[], Awaitable[bytes | None]], seconds: float, limits: ServerLimits
) -> list[Route]:
    """Routes to the files of a page, which are in this folder, and to its events at `/live`. event:
    gives the next one; None: there are no more. seconds: between two of them. Where too many pages
    are open, the oldest gets no more."""
    viewers = Pool(limits.viewers, limits.client_viewers)

    async def live(request: Request) -> Response:
        gone = asyncio.Event()
        place = Place(client_of(request.client.host if request.client else ""), gone.set, rank=0)
        viewers.take(place)  # all others are idle, so there is room

        async def events() -> AsyncIterator[bytes]:
            try:
                while not gone.is_set() and (one := await event()) is not None:
                    yield one
                    with suppress(TimeoutError):
                        await asyncio.wait_for(gone.wait(), seconds)
            finally:
                viewers.leave(place)

        headers = HEADERS | EVENT_HEADERS
        return StreamingResponse(events(), media_type="text/event-stream", headers=headers)

    files = [_route(path, folder / name, kind) for path, (name, kind) in FILES.items()]
    return [*files, Route("/live", live, methods=["GET"])]


def _route(path: str, file: Path, kind: str) -> Route:
    content = file.read_bytes()

    async def send(request: Request) -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return Route(path, send, methods=["GET"])
