"""The answer of /v1/responses, whole and as events. Nothing of it is kept."""

import time
import uuid
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from draftsmith.net.api_error import ApiError
from draftsmith.net.events import event
from draftsmith.serve.batching.answer_tokens import AnswerToken, Piece
from draftsmith.serve.openai.answers import ApiAnswer, entries
from draftsmith.serve.openai.openai_requests import ResponsesRequest
from draftsmith.serve.openai.text_request import Tooled


class ResponsesAnswer(ApiAnswer):
    """The items of one answer: a message of the assistant, unless there is nothing in it, and the
    calls of functions. In a stream the calls come whole, with the end."""

    _asked: ResponsesRequest

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._id, self._item_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._message = Piece(0, "", None)
        self._held: list[AnswerToken] = []  # that may be of a call
        self._items: list[dict[str, Any]] = []  # of calls
        self._opened = False
        self._events = 0

    def whole(self, texts: Sequence[Piece]) -> dict[str, Any]:
        for piece in texts:
            self._add(piece)
        return self._response(self._status, self._output(self._status))

    def opening(self) -> Iterator[bytes]:
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=self._response("in_progress", []))
        if not self._texts:
            yield from self._open()

    def part(self, piece: Piece) -> Iterator[bytes]:
        said = self._add(piece)
        if said.text or said.tokens:
            yield from self._open()
            logprobs = entries(said.tokens)
            yield self._of_part("output_text.delta", delta=said.text, logprobs=logprobs)

    def closing(self) -> Iterator[bytes]:
        status, content = self._status, self._content()
        if self._has_message:
            yield from self._open()
            done = {"text": content["text"], "logprobs": content["logprobs"]}
            yield self._of_part("output_text.done", **done)
            yield self._of_part("content_part.done", part=content)
            yield self._event("output_item.done", output_index=0, item=self._item(status))
        for at, item in enumerate(self._items, start=int(self._has_message)):
            begun = item | {"status": "in_progress", "arguments": ""}
            yield self._event("output_item.added", output_index=at, item=begun)
            place, arguments = {"item_id": item["id"], "output_index": at}, item["arguments"]
            yield self._event("function_call_arguments.delta", **place, delta=arguments)
            done = {"name": item["name"], "arguments": arguments}
            yield self._event("function_call_arguments.done", **place, **done)
            yield self._event("output_item.done", output_index=at, item=item)
        yield self._event(status, response=self._response(status, self._output(status)))

    def failure(self, error: ApiError) -> Iterator[bytes]:
        message = error.body["error"]["message"]
        response = self._response("failed", self._output("incomplete"))
        response["error"] = {"code": "server_error", "message": message}
        yield self._event("failed", response=response)

    def _add(self, piece: Piece) -> Piece:
        """What of the next piece is text of the message."""
        text, calls = self.read(piece)
        self._items += map(_call_item, calls)
        self._held += piece.tokens
        whole = self._message.text + text
        # Text behind a call has no entries: those of the call would stand among them.
        pairs = zip(whole, self._texts[piece.index].text, strict=False) if calls else ()
        length = next((at for at, (one, raw) in enumerate(pairs) if one != raw), len(whole))
        count = len(self._held)
        if self._texts and (piece.reason is None or calls):
            count = bisect_left(self._held, length, key=lambda token: token.start)
        said = replace(piece, text=text, tokens=self._held[:count])
        self._held = self._held[count:]
        self._message = self._message.joined(said)
        return said

    def _open(self) -> Iterator[bytes]:
        """The events that begin the message, once."""
        if not self._opened:
            self._opened = True
            yield self._event("output_item.added", output_index=0, item=self._item("in_progress"))
            yield self._of_part("content_part.added", part=self._content())

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
        return "incomplete" if self._message.reason == "length" else "completed"

    def _content(self) -> dict[str, Any]:
        text, logprobs = self._message.text, entries(self._message.tokens)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    @property
    def _has_message(self) -> bool:
        return bool(self._message.text) or not self._items

    def _output(self, status: str) -> list[dict[str, Any]]:
        return [*([self._item(status)] if self._has_message else []), *self._items]

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
            "instructions": asked.instructions,
            "metadata": asked.metadata,
            "max_output_tokens": asked.max_output_tokens,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_logprobs": asked.likeliest,
            **_tools_of(asked),
            "previous_response_id": None,
            "text": {"format": asked.text.given},
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


def _call_item(call: dict[str, Any]) -> dict[str, Any]:
    """A call of a function, as `call_ids` gives it, as an item of the output."""
    ids = {"id": f"fc_{call['id']}", "call_id": call["id"]}
    return {"type": "function_call", **ids, "status": "completed", **call["function"]}


def _tools_of(asked: Tooled) -> dict[str, Any]:
    """The request's fields on tools, as it gave them."""
    if not asked.tools:
        return {"tools": [], "tool_choice": "none", "parallel_tool_calls": False}
    tools = [{"parameters": {}, **tool["function"], "strict": None} for tool in asked.tools]
    choice = asked.tool_choice
    return {
        "tools": [{"type": "function", **tool} for tool in tools],
        "tool_choice": {"type": "function", "name": choice[0]}
        if isinstance(choice, tuple)
        else choice,
        "parallel_tool_calls": asked.parallel_tool_calls,
    }
