"""Reads a request for a chat and its answer, and keeps those that are text of the target alone."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# With one of these the engine writes the prompt in another way, or cuts or bends the answer. The
# target's own distribution then does not continue the text.
BENDING = (
    *("tools", "functions", "response_format", "structured_outputs", "guided_json"),
    *("guided_regex", "guided_choice", "guided_grammar", "grammar", "json_schema", "logit_bias"),
    *("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logits_processors"),
    *("chat_template", "chat_template_kwargs", "documents", "continue_final_message", "prefill"),
    *("ignore_eos", "min_tokens", "truncate_prompt_tokens"),
)


@dataclass(frozen=True)
class Exchange:
    """A chat and one complete answer to it. request: the id that the engine gave the answer."""

    request: str
    model: str
    messages: list[dict[str, str]]
    answer: str


def exchanges(body: dict[str, Any], answer: bytes, *, stream: bool) -> list[Exchange]:
    """Return the complete answers of a request, one for each choice.

    body: the request. answer: the body of the response with status 200. stream: it is a stream of
    events. An answer is complete if the target ended it. Answers with tool calls or reasoning, and
    requests with images or a setting of BENDING, give nothing.
    """
    messages = _messages(body.get("messages"))
    if messages is None or any(body.get(name) not in (None, [], {}, "", False) for name in BENDING):
        return []
    part = "delta" if stream else "message"
    texts: dict[int, str] = {}
    ended: set[int] = set()
    try:
        chunks = list(_events(answer)) if stream else [json.loads(answer)]
        for choice, index, message in (one for chunk in chunks for one in _choices(chunk, part)):
            spoken = {key for key, value in message.items() if value}
            if spoken - {"role", "content"}:
                return []  # reasoning, a tool call, a refusal
            texts[index] = texts.get(index, "") + (message.get("content") or "")
            # vLLM names the stop string or token in stop_reason.
            if choice.get("finish_reason") == "stop" and choice.get("stop_reason") is None:
                ended.add(index)
    except (ValueError, RecursionError):
        return []
    if not chunks:
        return []
    request, model = str(chunks[0].get("id", "")), str(chunks[0].get("model", ""))
    return [
        Exchange(request, model, messages, text)
        for index, text in sorted(texts.items())
        if index in ended and text.strip() and _is_unicode(text)
    ]


def _messages(value: Any) -> list[dict[str, str]] | None:
    """The messages as roles and text. None if they hold anything else."""
    messages = []
    for message in value if isinstance(value, list) else [None]:
        if not isinstance(message, dict) or message.get("tool_calls"):
            return None
        role, content = message.get("role"), message.get("content")
        if isinstance(content, list):
            if not all(isinstance(x, dict) and isinstance(x.get("text"), str) for x in content):
                return None
            content = "\n".join(part["text"] for part in content)
        if role not in ("system", "developer", "user", "assistant") or not isinstance(content, str):
            return None
        if (role in ("user", "assistant") and not content.strip()) or not _is_unicode(content):
            return None
        messages.append({"role": role, "content": content})
    return messages if messages and messages[-1]["role"] == "user" else None


def _choices(chunk: Any, part: str) -> Iterator[tuple[dict[str, Any], int, dict[str, Any]]]:
    """Each choice of an answer or of one event, with its index and what it says. part: the key of
    that. Raises ValueError for anything that is not in this shape."""
    choices = (chunk.get("choices") or []) if isinstance(chunk, dict) else None
    if not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
        raise ValueError("choices is no list of objects")
    for choice in choices:
        index, message = choice.get("index", 0), choice.get(part) or {}
        if not isinstance(index, int) or not isinstance(message, dict):
            raise ValueError("a choice has no index, or says nothing")
        if not isinstance(message.get("content") or "", str):
            raise ValueError("the content is no text")
        yield choice, index, message


def _events(answer: bytes) -> Iterator[Any]:
    """The JSON of a stream's events. Raises ValueError if the stream did not end with [DONE]."""
    # Bytes: str.splitlines also cuts at U+2028 and U+0085, which JSON may hold as they are.
    for line in answer.splitlines():
        field, _, value = line.partition(b":")
        if field != b"data":
            continue
        if value.strip() == b"[DONE]":
            return
        yield json.loads(value)
    raise ValueError("the stream has no end")


def _is_unicode(text: str) -> bool:
    """JSON can hold half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
