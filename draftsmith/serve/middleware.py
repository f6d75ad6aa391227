"""What surrounds the routes: ids of requests, paths that end with a slash, Anthropic's key."""

import re
import uuid
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftsmith.net.few_lines import server_logger

logger = server_logger(__name__)

ID_HEADER = "x-request-id"
_SANE_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class RequestIds:
    """Gives every answer the header X-Request-Id: the client's, if it has sent one that fits into a
    line of a log, or a new one. Answers with status 500 or above are logged with it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get(ID_HEADER, "")
        name = sent if _SANE_ID.fullmatch(sent) else f"req_{uuid.uuid4().hex}"

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[ID_HEADER] = name
                if message["status"] >= 500:
                    what = f"{scope['method']} {scope['path'][:200]!r}"
                    logger.warning("request %s: %s: status %d", name, what, message["status"])
            await send(message)

        path = scope["path"].rstrip("/") or "/"
        await self._app({**scope, "path": path}, receive, named)


class KeyHeader:
    """Lets requests to these paths send their key as `x-api-key` in place of an Authorization
    header."""

    def __init__(self, app: ASGIApp, paths: Collection[str]) -> None:
        self._app, self._paths = app, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in self._paths:
            scope = {**scope, "headers": list(scope["headers"])}
            headers = MutableHeaders(scope=scope)
            if (key := headers.get("x-api-key")) is not None:
                headers.setdefault("authorization", f"Bearer {key}")
        await self._app(scope, receive, send)
