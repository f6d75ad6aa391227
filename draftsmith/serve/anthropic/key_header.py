"""The header that Anthropic's clients send a key in."""

from collections.abc import Collection

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send


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
