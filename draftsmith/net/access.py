"""The guard before every server: hosts, origins, content types and keys.

A browser sends requests for any page that it shows, also to servers of this machine. Such a page
must not read answers, write records or change settings. It can bring a name of its own that leads
here (then `Host` is that name), call from another site (then `Origin` is that site), and send text
without asking (then the content type is not JSON).
"""

import base64
import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from ipaddress import IPv4Address, IPv6Address
from urllib.parse import unquote_to_bytes, urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from draftsmith.net.api_error import ApiError


@dataclass(frozen=True)
class Paths:
    """Which key the paths of a server ask for. A path that is not named asks for the key.

    open: paths that need neither key nor known host, each with the reason. admin: paths that ask
    for the admin key; one that ends with a slash is for all paths below it. others: why the paths
    that are not named ask for no key. "": they do ask for it.
    """

    open: Mapping[str, str] = field(default_factory=dict)
    admin: frozenset[str] = frozenset()
    others: str = ""

    def is_admin(self, path: str) -> bool:
        """Whether a path asks for the admin key."""
        return path in self.admin or any(
            one.endswith("/") and path.startswith(one) for one in self.admin
        )


@dataclass(frozen=True)
class Guard:
    """Who may call a server.

    hosts: names that it is called by. Addresses, localhost and the name of this machine always fit.
    origins: sites whose pages may call it, as `https://NAME`; `*`: all. The server's own page may.
    key: what requests send as `Authorization: Bearer KEY`. admin_key: the same for the paths of the
    administrator. None: nothing. A request with a key needs no known host: no page knows the key.
    paths: which of them a path asks for. json: bodies must be JSON.
    """

    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    key: str | None = None
    admin_key: str | None = None
    paths: Paths = field(default_factory=Paths)
    json: bool = True

    def fault(self, method: str, path: str, fields: Iterable[tuple[str, str]]) -> ApiError | None:
        """Why a request is refused. None: it is let in. fields: its headers."""
        headers: dict[str, str] = {}
        for name, value in fields:
            before = headers.get(name.lower())
            headers[name.lower()] = value if before is None else f"{before}, {value}"
        return (
            self._fault_of_origin(headers)
            or (None if path in self.paths.open else self._fault_of_caller(path, headers))
            or self._fault_of_body(method, headers)
        )

    def shows_admin_key(self, sent: Iterable[bytes]) -> bool:
        """Whether a value that was sent, a header's, the path or the query, has the admin key as a
        word, as it is, quoted for URLs any number of times, or as in Basic authentication."""
        key = (self.admin_key or "").encode()
        return bool(key) and any(
            _has_word(text, key)
            for one in sent
            for text in {one, unquote_to_bytes(one), _unquoted_often(one), _basic_text(one)}
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

    def _fault_of_origin(self, headers: dict[str, str]) -> ApiError | None:
        origin = headers.get("origin")
        if origin is None or {origin, "*"} & self.origins:
            return None
        if _netloc(origin) == headers.get("host", "").lower() != "":
            return None
        message = f"the origin is {_shown(origin)}; pages of other sites need --allow-origin"
        return ApiError(403, message, code="origin_not_allowed")

    def _fault_of_caller(self, path: str, headers: dict[str, str]) -> ApiError | None:
        key = None if self.paths.others else self.key
        if self.paths.is_admin(path):
            key = self.admin_key
        if key is None:
            return self._fault_of_host(headers.get("host"))
        if _is_key(headers.get("authorization", ""), key):
            return None
        return ApiError(
            401,
            "the key is missing or wrong; send it as Authorization: Bearer KEY",
            kind="authentication_error",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )

    def _fault_of_host(self, host: str | None) -> ApiError | None:
        if host is None:  # no browser leaves it out
            return None
        name = _host_name(host)
        if name in {"localhost", socket.gethostname().lower(), *self.hosts} or ip_address(name):
            return None
        message = f"the host is {_shown(host)}; name it with --allow-host, or ask for a key"
        return ApiError(403, message, code="host_not_allowed")

    def _fault_of_body(self, method: str, headers: dict[str, str]) -> ApiError | None:
        empty = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        kind = media_type(headers.get("content-type", ""))
        if not self.json or method != "POST" or empty or kind == "application/json":
            return None
        shown = _shown(kind) if kind else "missing"
        return ApiError(415, f"the content type is {shown}; expected application/json")


# What words end with in headers, paths, queries, and between a name and its password: all but
# letters, digits, - and _, with which another key may go on. A key may have such signs too.
_IN_WORD, _WORD_END = rb"[\w\x80-\xff-]", rb"[^\w\x80-\xff-]"
_URL_SAFE = bytes.maketrans(b"+/", b"-_")

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


def _unquoted_often(text: bytes) -> bytes:
    """A text that was quoted for URLs any number of times, in one pass: `%2525` is `%`, too."""
    return unquote_to_bytes(re.sub(rb"%(?:25)+(?=[0-9A-Fa-f]{2})", b"%", text))


def _basic_text(authorization: bytes) -> bytes:
    """NAME:PASSWORD of Basic authentication (RFC 7617). Empty: it is none. Both alphabets of base64
    are read (RFC 4648, 4 and 5)."""
    scheme, credentials, *_ = [*authorization.split(None, 1), b"", b""]
    with suppress(ValueError):
        if scheme.lower() == b"basic":
            return base64.urlsafe_b64decode(credentials.translate(_URL_SAFE) + b"==")
    return b""


def media_type(content_type: str) -> str:
    """A content type without its parameters, in lower case."""
    return content_type.partition(";")[0].strip().lower()


def _has_word(text: bytes, key: bytes) -> bool:
    return any(hmac.compare_digest(one[1], key) for one in _words_like(key).finditer(text))


@cache
def _words_like(key: bytes) -> re.Pattern[bytes]:
    """Finds the words, one after the other, that end where those of a key do. Headers of nothing
    but commas then cost no more time than others, and no time depends on the key's letters."""
    signs = re.compile(_WORD_END)
    word = b"".join(_WORD_END if signs.match(key, i) else _IN_WORD for i in range(len(key)))
    begin, end = rb"(?:\A|(?<=" + _WORD_END + rb"))", rb"(?:" + _WORD_END + rb"|\Z)"
    return re.compile(begin + rb"(?=(" + word + rb")" + end + rb")")


def _is_key(authorization: str, key: str) -> bool:
    return hmac.compare_digest(bearer_key(authorization), key.encode())


def _shown(header: str) -> str:
    """The begin of a header, in characters that every answer and log can hold."""
    return header[:100].encode("ascii", "backslashreplace").decode()


def _netloc(origin: str) -> str:
    """Host and port of a site. "": it is no address."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _host_name(host: str) -> str:
    """Without the port, and without the brackets of an address. "": it is no host."""
    try:
        return "" if "@" in host else (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def ip_address(name: str) -> IPv4Address | IPv6Address | None:
    """The address that a host is given by. None: it is given by a name."""
    with suppress(ValueError):
        return ipaddress.ip_address(name)
    return None
