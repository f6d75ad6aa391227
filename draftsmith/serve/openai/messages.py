"""What is answered or continued: messages, prompts, items; and stop strings.

These validators raise ApiError with the place of the first fault in the request.
"""

import json
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, WithJsonSchema

from draftsmith.net.api_error import ApiError
from draftsmith.serve.openai.fields import (
    MESSAGE_IGNORED,
    MESSAGE_REFUSED,
    PART_IGNORED,
    unsupported,
)
from draftsmith.serve.openai.known_fields import KnownFields, RequestPart, missing, unfit, validated

LONGEST_STOP = 256  # characters
MOST_STOPS = 32


class Message(RequestPart):
    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="developer is the newer name of system"
    )
    content: Annotated[str | None, WithJsonSchema({"title": "text or a list of parts of text"})] = (
        Field(None, description="the text; null is empty in a message of the assistant")
    )
    reasoning_content: str | None = Field(
        None, description="earlier reasoning, for templates that show it"
    )
    reasoning: str | None = Field(None, description="another name of `reasoning_content`")


class ToolMessage(RequestPart):
    role: Literal["tool"]
    content: str = Field(description="what the tool answered")
    tool_call_id: str = Field(description="the id of the call")


class TextPart(RequestPart):
    type: Literal["text", "input_text", "output_text"] = "text"
    text: str


MESSAGE = KnownFields(Message, MESSAGE_IGNORED, MESSAGE_REFUSED)
TOOL_MESSAGE = KnownFields(ToolMessage, MESSAGE_IGNORED, MESSAGE_REFUSED)
PART = KnownFields(TextPart, PART_IGNORED)


def read_messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise unfit("messages", value, "a list of messages")
    return [_chat_message(one, f"messages.{at}") for at, one in enumerate(value)]


def _chat_message(value: Any, path: str) -> dict[str, Any]:
    """A message of a chat, which may have calls of tools or what a tool answered."""
    match value:
        case {"role": "tool"}:
            content = read_text(value.get("content"), f"{path}.content")
            said = validated(TOOL_MESSAGE, value | {"content": content}, path)
            return said.model_dump()
        case {"role": "assistant", "tool_calls": [_, *_] as calls}:
            rest = {name: x for name, x in value.items() if name != "tool_calls"}
            made = [_call(x, f"{path}.tool_calls.{at}") for at, x in enumerate(calls)]
            return {**_message(rest, path), "tool_calls": made}
    return _message(value, path)


def _call(value: Any, path: str) -> dict[str, Any]:
    """An earlier call, with its arguments as an object: templates write them. They come as JSON,
    as OpenAI writes them, or as the object itself."""
    match value:
        case {"id": str(id_), "function": {"name": str(name), **rest}}:
            given = rest.get("arguments")
        case _:
            raise unfit(path, value, 'an object {"id": …, "function": {"name": …, "arguments": …}}')
    if not isinstance(given, str | dict):
        raise unfit(f"{path}.function.arguments", given, "JSON as text, or an object")
    try:
        arguments = json.loads(given or "{}") if isinstance(given, str) else given
    except (ValueError, RecursionError):
        raise unfit(f"{path}.function.arguments", given, "JSON") from None
    function = {"name": name, "arguments": arguments}
    return {"id": id_, "type": "function", "function": function}


def _message(value: Any, path: str) -> dict[str, str]:
    """A message for a chat template."""
    if isinstance(value, dict) and value.get("role") in ("tool", "function"):
        raise unsupported(value["role"], f"{path}.role")
    values = MESSAGE.served_fields(value, path)
    empty = values.get("role") == "assistant" and value.get("content") is None
    if "content" not in values and not empty:
        raise missing(f"{path}.content")
    content = read_text(values.get("content", ""), f"{path}.content")
    said = validated(MESSAGE, values | {"content": content}, path)
    # Chat templates know no developer.
    role = "system" if said.role == "developer" else said.role
    reasoning = said.reasoning_content or said.reasoning
    thought = {} if reasoning is None else {"reasoning_content": reasoning}
    return {"role": role, "content": content, **thought}


def read_text(value: Any, path: str, part: KnownFields = PART, parts: str = "parts") -> str:
    """A text, given as text or in parts of text. part: the fields of one. parts: their name."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise unfit(path, value, f"text or a list of {parts} of text")
    kinds = get_args(part.served.model_fields["type"].annotation)
    texts = []
    for at, one in enumerate(value):
        match one:
            case {"type": str(kind)} if kind not in kinds:
                raise unsupported(kind, f"{path}.{at}.type")
        texts.append(validated(part, one, f"{path}.{at}").text)
    return "\n".join(texts)


def read_prompts(value: Any) -> list[str | list[int]]:
    """One or several prompts, as text or token ids. The first element says which."""
    match value:
        case str():
            return [value]
        case [int(), *_]:
            return [_each(value, int, "prompt", "a token id")]
        case [str(), *_]:
            return _each(value, str, "prompt", "text")
        case [list(), *_]:
            rows = _each(value, list, "prompt", "a list of token ids")
            return [_each(x, int, f"prompt.{at}", "a token id") for at, x in enumerate(rows)]
    raise unfit("prompt", value, "text or token ids, one prompt or several")


def _each(values: list[Any], kind: type, path: str, expected: str) -> list[Any]:
    """A list whose elements all have a type. Raises ApiError for the first other one."""
    for at, one in enumerate(values):
        if type(one) is not kind:
            raise unfit(f"{path}.{at}", one, expected)
    return values


def read_stops(value: Any, field: str = "stop") -> tuple[str, ...]:
    """Stop strings. An empty one asks for nothing. field: what gives them."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise unfit(field, value, "text or a list of texts")
    if len(stops) > MOST_STOPS:
        raise unfit(field, value, f"at most {MOST_STOPS} texts")
    for at, stop in enumerate(_each(stops, str, field, "text")):
        if len(stop) > LONGEST_STOP:
            message = f"{field}.{at} has {len(stop)} characters; expected at most {LONGEST_STOP}"
            raise ApiError(400, message, param=field, code="invalid_value")
    return tuple(filter(None, stops))


def read_items(value: Any) -> list[dict[str, Any]]:
    """The messages of /v1/responses, given as text or as items. Calls that follow each other, or a
    message of the assistant, are in one message."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise unfit("input", value, "text or a list of messages")
    messages: list[dict[str, Any]] = []
    for at, item in enumerate(value):
        path = f"input.{at}"
        match item:
            case {"type": "reasoning"}:  # it comes back from earlier answers
                pass
            case {"type": "function_call"}:
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                call = _call({"id": item.get("call_id"), "function": item}, path)
                messages[-1].setdefault("tool_calls", []).append(call)
            case {"type": "function_call_output"}:
                content = read_text(item.get("output"), f"{path}.output")
                said = {"tool_call_id": item.get("call_id"), "content": content}
                messages.append(
                    validated(TOOL_MESSAGE, {"role": "tool", **said}, path).model_dump()
                )
            case {"type": str(kind)} if kind != "message":
                raise unsupported(kind, f"{path}.type")
            case _:
                messages.append(_message(item, path))
    return messages
