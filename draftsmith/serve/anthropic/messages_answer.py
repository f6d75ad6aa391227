"""The answer of /v1/messages, whole and as events."""

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from draftsmith.net.api_error import ApiError
from draftsmith.net.events import event
from draftsmith.serve.anthropic.messages_request import MessagesRequest
from draftsmith.serve.batching.answer_tokens import Piece
from draftsmith.serve.openai.answers import ApiAnswer

_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_REASONS = {"length": "max_tokens", "stop": "end_turn"}


class MessagesAnswer(ApiAnswer):
    """A block of text, unless there is no text, and one of each call. In a stream the calls come
    whole, with the end."""

    _asked: MessagesRequest

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._id = f"msg_{uuid.uuid4().hex}"
        self._text, self._calls = "", list[dict[str, Any]]()
        self._end = Piece(0, "", None)

    def whole(self, texts: Sequence[Piece]) -> dict[str, Any]:
        for piece in texts:
            self._add(piece)
        said = [{"type": "text", "text": self._text}] if self._text or not self._calls else []
        return self._message([*said, *self._calls], self.generated_tokens) | {
            "stop_reason": self._reason,
            "stop_sequence": self._end.stop,
            "draftsmith": self.counts(),
        }

    def opening(self) -> Iterator[bytes]:
        yield _event("message_start", message=self._message([], 0))

    def part(self, piece: Piece) -> Iterator[bytes]:
        before = self._text
        text = self._add(piece)
        if text:
            if not before:
                yield _event(
                    "content_block_start", index=0, content_block={"type": "text", "text": ""}
                )
            delta = {"type": "text_delta", "text": text}
            yield _event("content_block_delta", index=0, delta=delta)

    def closing(self) -> Iterator[bytes]:
        first = int(bool(self._text))
        if self._text:
            yield _event("content_block_stop", index=0)
        for at, call in enumerate(self._calls, start=first):
            yield _event("content_block_start", index=at, content_block=call | {"input": {}})
            delta = {"type": "input_json_delta", "partial_json": json.dumps(call["input"])}
            yield _event("content_block_delta", index=at, delta=delta)
            yield _event("content_block_stop", index=at)
        yield _event(
            "message_delta",
            delta={"stop_reason": self._reason, "stop_sequence": self._end.stop},
            usage={"output_tokens": self.generated_tokens},
            draftsmith=self.counts(),
        )
        yield _event("message_stop")

    def failure(self, error: ApiError) -> Iterator[bytes]:
        yield event(as_anthropic(error), "error")

    def _add(self, piece: Piece) -> str:
        """What of the next piece is text."""
        text, calls = self.read(piece)
        self._text, self._end = self._text + text, piece
        self._calls += map(_block, calls)
        return text

    @property
    def _reason(self) -> str:
        if self._calls:
            return "tool_use"
        reason = self._end.reason or "length"
        return "stop_sequence" if self._end.stop is not None else _REASONS.get(reason, reason)

    def _message(self, content: list[dict[str, Any]], generated: int) -> dict[str, Any]:
        cached = self.cached_tokens or 0
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": self.prompt_tokens - cached,
                "cache_read_input_tokens": cached,
                "cache_creation_input_tokens": 0,
                "output_tokens": generated,
            },
        }


def as_anthropic(error: ApiError) -> dict[str, Any]:
    """The body of an error, as Anthropic's clients read it."""
    said = error.body["error"]
    found = _KINDS.get(error.status, "api_error" if error.status >= 500 else said["type"])
    return {"type": "error", "error": {**said, "type": found}}


def _block(call: dict[str, Any]) -> dict[str, Any]:
    """A call, as `call_ids` gives it, as a block. Arguments that are no object are kept in one."""
    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"] or "{}")
    given = arguments if isinstance(arguments, dict) else {"arguments": arguments}
    return {"type": "tool_use", "id": f"toolu_{call['id']}", "name": name, "input": given}


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
