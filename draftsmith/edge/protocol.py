"""The messages between an edge and a verification server: fields, form on the wire, limits.

A message is one binary WebSocket frame: a msgpack map with `type` and the fields of `UP` (from the
edge) or `DOWN` (from the server).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgpack

VERSION = 2
FRAME_BYTES = 1 << 16
# Token ids in a frame: a msgpack integer below 2³² has up to 5 bytes, and other fields need space.
FRAME_IDS = 12_000
_MASK = (1 << 64) - 1

Message = dict[str, Any]


class ProtocolError(Exception):
    """A message that cannot be served.

    code: what is wrong; docs/reference/edge_protocol.md has the list. req, seq: the numbers of the
    request and the draft it is about, −1 for none. retry_ms: when to try again, 0 if that does not
    help.
    """

    def __init__(
        self, code: str, message: str, *, req: int = -1, seq: int = -1, retry_ms: int = 0
    ) -> None:
        super().__init__(message)
        self.code, self.req, self.seq, self.retry_ms = code, req, seq, retry_ms

    @property
    def closes(self) -> bool:
        """Whether the connection ends after it."""
        return self.code in ("malformed", "version", "full")


def _is_whole(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and value == value and abs(value) < 1e18


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= FRAME_IDS
        and all(type(token) is int and 0 <= token < 1 << 31 for token in value)
    )


# The fields of a sampling that a message has, in this order.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and len(value) == len(SAMPLING) and all(map(_is_number, value))


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "count": ("a whole number ≥ 0", _is_whole(0, (1 << 53) - 1)),
    "place": ("a whole number ≥ −1", _is_whole(-1, (1 << 53) - 1)),
    "seed": ("a whole number of 64 bits", _is_whole(-(1 << 63), (1 << 63) - 1)),
    "hash": ("a whole number from 0 to 2⁶⁴ − 1", _is_whole(0, _MASK)),
    "number": ("a number", _is_number),
    "flag": ("true or false", lambda value: type(value) is bool),
    "text": ("a text", lambda value: isinstance(value, str) and len(value) <= 4096),
    "ids": (f"a list of at most {FRAME_IDS} token ids", _is_ids),
    "sampling": ("a list of 5 numbers", _is_numbers),
    "map": ("a map", lambda value: isinstance(value, dict)),
}

UP: dict[str, dict[str, str]] = {
    "hello": {"version": "count"},
    "resume": {"version": "count", "session": "text"},
    "open": {
        "req": "count",
        "seq": "count",
        "length": "count",
        "ids": "ids",
        "max_tokens": "count",
        "seed": "seed",
        "row": "seed",
        "sampling": "sampling",
    },
    "ids": {"req": "count", "ids": "ids"},
    "draft": {"req": "count", "seq": "count", "length": "count", "hash": "hash", "ids": "ids"},
    "cancel": {"req": "count"},
    "bye": {},
}
DOWN: dict[str, dict[str, str]] = {
    "welcome": {
        "version": "count",
        "session": "text",
        "resumed": "flag",
        "rule": "text",
        "lossless": "flag",
        "couples": "flag",
        "window": "count",
        "max_positions": "count",
        "fingerprint": "map",
        "token_count": "count",
        "weights": "text",
        "kv_seconds": "number",
        "session_seconds": "number",
    },
    "verdict": {
        "req": "count",
        "seq": "count",
        "accepted": "count",
        "next": "place",
        "length": "count",
        "hash": "hash",
        "ended": "flag",
        "window": "count",
        "busy_ms": "number",
        "queue_ms": "number",
        "prefill_ms": "number",
        "verify_ms": "number",
    },
    "error": {
        "code": "text",
        "message": "text",
        "req": "place",
        "seq": "place",
        "retry_ms": "count",
    },
}


def encode(kind: str, **fields: Any) -> bytes:
    """The frame of a message."""
    packed: bytes = msgpack.packb({"type": kind, **fields})
    return packed


def decode(frame: bytes | str, kinds: Mapping[str, Mapping[str, str]]) -> Message:
    """The message of a frame. kinds: `UP` or `DOWN`, what the other side may send.

    Raises ProtocolError `malformed` for anything else than such a message with exactly its fields.
    """
    if isinstance(frame, str):
        raise ProtocolError("malformed", "found a text frame; expected binary frames of msgpack")
    try:
        message = msgpack.unpackb(frame)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError("malformed", f"the frame is not msgpack ({error})") from None
    kind = message.get("type") if isinstance(message, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise ProtocolError(
            "malformed", f"found no known type; expected a map with type {', '.join(kinds)}"
        )
    fields = kinds[kind]
    if message.keys() != {"type", *fields}:
        raise ProtocolError(
            "malformed",
            f"{kind} has the fields {sorted(map(str, message.keys() - {'type'}))}; "
            f"expected {sorted(fields)}",
        )
    for name, what in fields.items():
        expected, fits = _KINDS[what]
        if not fits(message[name]):
            raise ProtocolError(
                "malformed", f"{name} of {kind} is {message[name]!r:.80}; expected {expected}"
            )
    return message


def hash_ids(ids: Iterable[int], start: int = 0) -> int:
    """The rolling hash of token ids: FNV-1a over 64 bits, one step for each id.

    start: the hash of the ids before them. It finds texts that differ by mistake, not on purpose.

    >>> hash_ids([3, 4]) == hash_ids([4], hash_ids([3]))
    True
    """
    value = start or 0xCBF29CE484222325
    for token in ids:
        value = ((value ^ (token + 1)) * 0x100000001B3) & _MASK
    return value
