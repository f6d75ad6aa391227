"""The engine behind the recorder, and the switch from one engine to the next."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from decode.base.artifact import write_file
from decode.base.errors import UserError
from train.settings.server_config import server_address

CONNECT_SECONDS = 10.0
# A target may read a long prompt for minutes before its answer begins.
TIMEOUTS = {"connect": CONNECT_SECONDS, "read": None, "write": None, "pool": None}
# Between the end of an answer and the end of idle connections: less than an engine keeps them.
IDLE_SECONDS = 2.0


def engine_url(url: str) -> str:
    """An engine's address without a path. Raises UserError for anything else."""
    parts = server_address(url)
    if parts is None or parts.path not in ("", "/"):
        raise UserError(f"the upstream is {url!r}; expected http://HOST:PORT without a path")
    return f"{parts.scheme}://{parts.netloc}"


@dataclass
class Upstream:
    """One engine. in_flight: requests whose answers have not ended."""

    url: str
    in_flight: int = 0
    transport: httpx2.AsyncHTTPTransport = field(
        default_factory=lambda: httpx2.AsyncHTTPTransport(
            trust_env=False,
            limits=httpx2.Limits(
                max_connections=None, max_keepalive_connections=64, keepalive_expiry=IDLE_SECONDS
            ),
        )
    )

    async def send(
        self,
        method: str,
        target: bytes,
        headers: Iterable[tuple[bytes, bytes]],
        body: bytes,
    ) -> httpx2.Response:
        """Send a request; return when the answer begins. target: path and query as they came.
        Raises httpx2.TransportError."""
        # Not as a part of the URL, which knows no `*` and takes dots out of a path.
        more = {"timeout": TIMEOUTS, "target": target}
        request = httpx2.Request(
            method, self.url, headers=list(headers), content=body, extensions=more
        )
        return await self.transport.handle_async_request(request)


class Upstreams:
    """The engine that gets new requests, and earlier ones with requests that have not ended.

    url: the url of the first engine. memory: the file with the last switch. A recorder that is
    started again with the same first engine continues at the one it was switched to; another first
    engine counts for itself. Raises UserError for an invalid address, and for a damaged file.
    """

    def __init__(self, url: str, memory: Path | None = None) -> None:
        self._first, self._memory = engine_url(url), memory
        self.current = Upstream(self._remembered() or self._first)
        self.draining: list[Upstream] = []
        self._switching = asyncio.Lock()

    async def switch(self, url: str) -> None:
        """Send new requests to another engine. Requests that run stay where they are. Raises
        UserError for an invalid address, and if the switch cannot be stored."""
        url = engine_url(url)
        async with self._switching:
            if url == self.current.url:
                return
            if self._memory is not None:  # first, so that a full disk leaves all as it was
                write_file(self._memory, json.dumps({"first": self._first, "current": url}))
            self.draining.append(self.current)
            # An engine that is still draining goes on with the requests that it has.
            back = next((up for up in self.draining if up.url == url), None)
            if back is not None:
                self.draining.remove(back)
            self.current = back or Upstream(url)
            await self.close_idle()

    def _remembered(self) -> str | None:
        if self._memory is None or not self._memory.is_file():
            return None
        try:
            stored = json.loads(self._memory.read_text(encoding="utf-8"))
            return engine_url(stored["current"]) if stored["first"] == self._first else None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self._memory} is damaged; expected the addresses of a recorder's first engine "
                "and of the one it was switched to. Delete it to begin at --upstream"
            ) from error

    async def close_idle(self) -> None:
        """Close the connections to earlier engines that have no request left."""
        for upstream in [up for up in self.draining if not up.in_flight]:
            self.draining.remove(upstream)
            await upstream.transport.aclose()

    async def close(self) -> None:
        """Close all connections."""
        for upstream in [self.current, *self.draining]:
            await upstream.transport.aclose()

    def describe(self) -> dict[str, object]:
        """What `GET /admin/upstream` answers."""
        return {
            "url": self.current.url,
            "in_flight": self.current.in_flight,
            "draining": [{"url": up.url, "in_flight": up.in_flight} for up in self.draining],
        }
