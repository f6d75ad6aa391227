"""Server-sent events."""

import json
from typing import Any

# Proxies neither keep such an answer nor hold its events back.
EVENT_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
# Python, and clients that cut lines as Python does, end a line at these characters too.
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


def event(value: dict[str, Any], name: str | None = None) -> bytes:
    """A server-sent event. name: the name of its kind."""
    data = json.dumps(value, ensure_ascii=False).translate(_LINE_ENDS)
    begin = "" if name is None else f"event: {name}\n"
    return f"{begin}data: {data}\n\n".encode()
