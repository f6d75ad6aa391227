"""The HTTP server around an application of this package."""

import socket
from collections.abc import Callable
from typing import Any, Literal

import uvicorn
from starlette.types import ASGIApp


class HttpServer(uvicorn.Server):
    """A server that logs warnings only. Its answers do not name it.

    closing_seconds: for connections that are open at the end. started_up: called when it listens.
    lifespan: auto: the application is told when it begins and ends. settings: more of uvicorn's.
    """

    def __init__(
        self,
        app: ASGIApp,
        closing_seconds: int,
        started_up: Callable[[], None] = lambda: None,
        lifespan: Literal["auto", "off"] = "off",
        **settings: Any,
    ) -> None:
        config = uvicorn.Config(
            app,
            lifespan=lifespan,
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=closing_seconds,
            **settings,
        )
        super().__init__(config)
        self._started_up = started_up

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._started_up()
