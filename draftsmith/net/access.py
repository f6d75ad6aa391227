"""The guard before every server: hosts, origins, content types and keys.

A browser sends requests for any page that it shows, also to servers of this machine. Such a page
must not read answers, write records or change settings. It can bring a name of its own that leads
here (then `Host` is that name), call from another site (then `Origin` is that site), and send text
without asking (then the content type is not JSON).
"""

import hmac
import ipaddress
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

# How the paths begin that change a service.
ADMIN = ("/admin/", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")


@dataclass(frozen=True)
class Fault:
    """Why a request is not let in: an error status, a message and OpenAI's code."""

    status: int
    message: str
    code: str | None = None

    def response(self) -> Response:
        """As an answer in the shape of OpenAI's API."""
        headers = {"x-should-retry": "false"}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        return error_response(self.status, self.message, kind, self.code, headers)


@dataclass(frozen=True)
class Guard:
    """Who may call a server.

    hosts: names that it is called by. Addresses, localhost and the name of this machine always fit.
    origins: sites whose pages may call it, as `https://NAME`; `*`: all. The server's own page may.
    key: what requests send as `Authorization: Bearer KEY`. admin_key: the same for the paths
    of `ADMIN`. None: nothing. A request with a key needs no known host: no page knows the key.
    open_paths: these need neither host nor key. json: bodies must be JSON.
    """

    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    key: str | None = None
    admin_key: str | None = None
    open_paths: frozenset[str] = frozenset()
    json: bool = True

    def fault(self, method: str, path: str, fields: Iterable[tuple[str, str]]) -> Fault | None:
        """Why a request is refused. None: it is let in. fields: its headers."""
        headers: dict[str, str] = {}
        for name, value in fields:
            before = headers.get(name.lower())
            headers[name.lower()] = value if before is None else f"{before}, {value}"
        return (
            self._fault_of_origin(headers)
            or (None if path in self.open_paths else self._fault_of_caller(path, headers))
            or self._fault_of_body(method, headers)
        )

    def around(self, app: ASGIApp) -> ASGIApp:
        """An application behind this guard. Allowed sites get the headers that browsers ask for."""
        guarded = _Guarded(app, self)
        if not self.origins:
            return guarded
        return CORSMiddleware(
            guarded,
            allow_origins=sorted(self.origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
        )

    def _fault_of_origin(self, headers: dict[str, str]) -> Fault | None:
        origin = headers.get("origin")
        if origin is None or {origin, "*"} & self.origins:
            return None
        if urlsplit(origin).netloc.lower() == headers.get("host", "").lower() != "":
            return None
        message = f"the origin is {origin[:100]}; pages of other sites need --allow-origin"
        return Fault(403, message, "origin_not_allowed")

    def _fault_of_caller(self, path: str, headers: dict[str, str]) -> Fault | None:
        key = self.admin_key if path.startswith(ADMIN) else self.key
        if key is None:
            return self._fault_of_host(headers.get("host"))
        if hmac.compare_digest(bearer_key(headers.get("authorization", "")), key.encode()):
            return None
        message = "the key is missing or wrong; send it as Authorization: Bearer KEY"
        return Fault(401, message, "invalid_api_key")

    def _fault_of_host(self, host: str | None) -> Fault | None:
        if host is None:  # no browser leaves it out
            return None
        name = _host_name(host)
        if name in {"localhost", socket.gethostname().lower(), *self.hosts} or ip_address(name):
            return None
        message = f"the host is {host[:100]}; name it with --allow-host, or ask for a key"
        return Fault(403, message, "host_not_allowed")

    def _fault_of_body(self, method: str, headers: dict[str, str]) -> Fault | None:
        empty = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        kind = media_type(headers.get("content-type", ""))
        if not self.json or method != "POST" or empty or kind == "application/json":
            return None
        return Fault(415, f"the content type is {kind or 'missing'}; expected application/json")


# Without keys: for programs of this machine, and the server's own page.
LOCAL = Guard()


class _Guarded:
    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app, self._guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            fields = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in scope["headers"]]
            fault = self._guard.fault(scope["method"], scope["path"], fields)
            if fault is not None:
                await fault.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def bearer_key(authorization: str) -> bytes:
    """The key of an Authorization header; empty if it has none. The scheme is in any case
    (RFC 9110, 11.1)."""
    scheme, _, key = authorization.partition(" ")
    return key.strip().encode("latin-1", "replace") if scheme.lower() == "bearer" else b""


def media_type(content_type: str) -> str:
    """A content type without its parameters, in lower case."""
    return content_type.partition(";")[0].strip().lower()


def error_response(
    status: int,
    message: str,
    kind: str = "invalid_request_error",
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """An error in the shape of OpenAI's API."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": error}, status, headers)


def _host_name(host: str) -> str:
    """Without the port, and without the brackets of an address."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def ip_address(name: str) -> IPv4Address | IPv6Address | None:
    """The address that a host is given by. None: it is given by a name."""
    with suppress(ValueError):
        return ipaddress.ip_address(name)
    return None
