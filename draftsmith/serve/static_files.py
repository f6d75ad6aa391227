"""The files of a page, with headers that let it load nothing from elsewhere."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

# By path: the file's name and its media type.
FILES = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
    "/favicon.svg": ("favicon.svg", "image/svg+xml"),
}
# Nothing from elsewhere, nothing inline, in no frame.
_POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def file_routes(folder: Path) -> list[Route]:
    """Routes to the files of a page, which are in this folder."""
    return [_route(path, folder / name, kind) for path, (name, kind) in FILES.items()]


def _route(path: str, file: Path, kind: str) -> Route:
    content = file.read_bytes()

    async def send(request: Request) -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return Route(path, send, methods=["GET"])
