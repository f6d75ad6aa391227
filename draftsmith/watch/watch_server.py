"""The page that follows a run, and the server around it: on this machine only, and read-only."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from draftsmith.net.access import Guard, Paths
from draftsmith.net.connections import HEALTH
from draftsmith.net.events import event
from draftsmith.net.http_server import HttpServer
from draftsmith.net.limits import ServerLimits
from draftsmith.net.page import page_routes
from draftsmith.watch.run_state import RunState

HOST = "127.0.0.1"
PATHS = Paths(
    {HEALTH: "it says that the server runs, and nothing else"},
    others="the page is read-only, and only programs of this machine can call it",
)
_STATIC = Path(__file__).parent / "static"
_SECONDS = 1.0  # between two looks at the files
_CLOSING_SECONDS = 1


class WatchServer(HttpServer):
    """Sends the page at `/`, and at `/live` the state of a run once a second, as server-sent
    events. started_up: called when it listens. limits: of its clients."""

    def __init__(
        self,
        state: RunState,
        started_up: Callable[[], None] = lambda: None,
        limits: ServerLimits | None = None,
    ) -> None:
        limits = limits or ServerLimits()
        health = Route(HEALTH, _health, methods=["GET"])
        app = Starlette(routes=[health, *page_routes(_STATIC, self._next_state, _SECONDS, limits)])
        super().__init__(Guard(paths=PATHS).around(app), _CLOSING_SECONDS, started_up, limits)
        self._state, self._reading = state, asyncio.Lock()

    async def _next_state(self) -> bytes | None:
        if self.should_exit:
            return None
        # One reader at a time. Files are read in another thread, so the page is not held up.
        async with self._reading:
            return event(await asyncio.to_thread(self._state.read))


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})
