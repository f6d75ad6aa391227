"""Server-sent events."""

import json
from collections.abc import Iterator
from typing import Any

# Proxies neither keep such an answer nor hold its events back.
EVENT_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
DONE = b"[DONE]"  # the last event of OpenAI's streams
# Python, and clients that cut lines as Python does, end a line at these characters too.
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


def event(value: dict[str, Any], name: str | None = None) -> bytes:
    """A server-sent event. name: the name of its kind."""
    data = json.dumps(value, ensure_ascii=False).translate(_LINE_ENDS)
    begin = "" if name is None else f"event: {name}\n"
    return f"{begin}data: {data}\n\n".encode()


def read_events(body: bytes) -> Iterator[bytes]:
    """The data of each server-sent event in a body, as the standard of HTML cuts it into lines: at
    line feeds and carriage returns, but not at other signs that JSON may hold as they are, such as
    U+2028. An event that is not complete is left out."""
    data: list[bytes] = []
    lines = body.removeprefix(b"\xef\xbb\xbf").splitlines()
    if not body.endswith((b"\n", b"\r")):
        del lines[-1:]  # a torn line
    for line in lines:
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif not line and data:
            yield b"\n".join(data)
            data = []
