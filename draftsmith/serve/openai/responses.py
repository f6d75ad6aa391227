"""The answer of /v1/responses, whole and as events. Nothing of it is kept."""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from draftsmith.net.events import event
from draftsmith.serve.openai.answers import ApiAnswer, Piece, entries
from draftsmith.serve.openai.api_errors import ApiError
from draftsmith.serve.openai.formats import ANY_TEXT


class ResponsesAnswer(ApiAnswer):
    """One message of the assistant with one text."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._id, self._item_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._so_far = Piece(0, "", None)
        self._events = 0

    def whole(self, texts: Sequence[Piece]) -> dict[str, Any]:
        (self._so_far,) = texts
        return self._response(self._status, [self._item(self._status)])

    def opening(self) -> Iterator[bytes]:
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=self._response("in_progress", []))
        yield self._event("output_item.added", output_index=0, item=self._item("in_progress"))
        yield self._of_part("content_part.added", part=self._content())

    def part(self, piece: Piece) -> Iterator[bytes]:
        self._so_far = self._so_far.joined(piece)
        if piece.text or piece.tokens:
            logprobs = entries(piece.tokens)
            yield self._of_part("output_text.delta", delta=piece.text, logprobs=logprobs)

    def closing(self) -> Iterator[bytes]:
        status, content = self._status, self._content()
        done = {"text": content["text"], "logprobs": content["logprobs"]}
        yield self._of_part("output_text.done", **done)
        yield self._of_part("content_part.done", part=content)
        item = self._item(status)
        yield self._event("output_item.done", output_index=0, item=item)
        yield self._event(status, response=self._response(status, [item]))

    def failure(self, error: ApiError) -> Iterator[bytes]:
        message = error.body["error"]["message"]
        response = self._response("failed", [self._item("incomplete")])
        response["error"] = {"code": "server_error", "message": message}
        yield self._event("failed", response=response)

    def _of_part(self, kind: str, **fields: Any) -> bytes:
        """An event of the one part of the one item."""
        at = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return self._event(kind, **at, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        name, number = f"response.{kind}", self._events
        self._events += 1
        return event({"type": name, "sequence_number": number, **fields}, name)

    @property
    def _status(self) -> str:
        return "incomplete" if self._so_far.reason == "length" else "completed"

    def _content(self) -> dict[str, Any]:
        text, logprobs = self._so_far.text, entries(self._so_far.tokens)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _item(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._content()]
        shared = {"id": self._item_id, "type": "message", "role": "assistant"}
        return {**shared, "status": status, "content": content}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        asked, ended = self._asked, status != "in_progress"
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "model": self._model,
            "output": output,
            "error": None,
            "incomplete_details": cut,
            "instructions": getattr(asked, "instructions", None),
            "metadata": getattr(asked, "metadata", {}),
            "max_output_tokens": asked.limit[1],
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_logprobs": asked.likeliest,
            "tools": [],
            "tool_choice": "none",
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "text": {"format": getattr(asked, "text", ANY_TEXT).given},
            "truncation": "disabled",
            "store": False,
            "usage": self._usage() if ended else None,
            "draftsmith": self.counts() if ended else None,
        }

    def _usage(self) -> dict[str, Any]:
        read, generated = self.prompt_tokens, self.generated_tokens
        cached = {"cached_tokens": self.cached_tokens or 0, "cache_write_tokens": 0}
        return {
            "input_tokens": read,
            "input_tokens_details": cached,
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + generated,
        }
