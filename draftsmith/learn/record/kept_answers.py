"""Reads a request for a chat and its answer, and keeps those that are text of the target alone."""

import json
from collections import Counter
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

LONGEST_TEXT = 1 << 18  # characters; the search for personal data keeps the proxy from its work


@dataclass(frozen=True)
class Exchange:
    """A chat and one complete answer to it. request: the id that the engine gave the answer."""

    request: str
    model: str
    messages: list[dict[str, str]]
    answer: str


class NotRecorded(Exception):
    """A request asks to be recorded, and is not. The message says why, in few different texts, so
    that they can be counted."""


def exchanges(
    body: dict[str, Any], answer: bytes, *, stream: bool
) -> tuple[list[Exchange], Counter[str]]:
    """Return the complete answers of a request, and how many of its choices are left out, by the
    reason.

    body: the request. answer: the body of the response with status 200. stream: it is a stream of
    events. An answer is complete if the target ended it. Raises NotRecorded for answers with tool
    calls or reasoning, and for requests with images or a setting of BENDING.
    """
    messages = _messages(body.get("messages"))
    bending = sorted(name for name in BENDING if not _asks_nothing(name, body.get(name)))
    if bending:
        raise NotRecorded(f"the request has {', '.join(bending)}")
    part = "delta" if stream else "message"
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    try:
        chunks = list(_events(answer)) if stream else [json.loads(answer)]
        for choice, index, message in (one for chunk in chunks for one in _choices(chunk, part)):
            spoken = {key for key, value in message.items() if value} - {"role", "content"}
            if spoken:  # reasoning, a tool call, a refusal
                raise NotRecorded(f"the answer has {', '.join(sorted(spoken))[:80]}")
            texts[index] = texts.get(index, "") + (message.get("content") or "")
            if choice.get("finish_reason") is not None:
                ends[index] = _end(choice)
    except (ValueError, RecursionError):
        raise NotRecorded("the answer is not complete, or has another shape") from None
    if not texts:
        raise NotRecorded("the answer has no choices")
    request, model = str(chunks[0].get("id", "")), str(chunks[0].get("model", ""))
    found, left_out = [], Counter[str]()
    for index, text in sorted(texts.items()):
        reason = _reason_against(text, ends.get(index))
        if reason is None:
            found.append(Exchange(request, model, messages, text))
        else:
            left_out[reason] += 1
    return found, left_out


def _asks_nothing(name: str, value: Any) -> bool:
    """Whether a setting of BENDING has a value that leaves prompt and answer as they are."""
    text = {"type": "text"}
    return value in (None, [], {}, "", False) or (name == "response_format" and value == text)


def _end(choice: dict[str, Any]) -> str:
    """Why a choice ended; "stop" if the target ended it."""
    # vLLM and SGLang name the string or the token that ended an answer. Requests with such strings
    # and tokens are left out, so a token is one of the target's own.
    for name in ("stop_reason", "matched_stop"):
        if isinstance(choice.get(name), str):
            return "a stop string of the engine"
    return str(choice["finish_reason"])[:40]


def _reason_against(text: str, end: str | None) -> str | None:
    """Why an answer is not recorded; None: it is. end: as of `_end`; None: it did not end."""
    if end != "stop":
        return f"the answer ends by {end or 'nothing'}, and not by the target"
    if not text.strip():
        return "the answer is empty"
    if len(text) > LONGEST_TEXT:
        return f"the answer is longer than {LONGEST_TEXT:,} characters"
    return None if _is_unicode(text) else "the answer is no Unicode"


def _messages(value: Any) -> list[dict[str, str]]:
    """The messages as roles and text. Raises NotRecorded if they hold anything else."""
    messages = []
    for message in value if isinstance(value, list) else [None]:
        if not isinstance(message, dict) or message.get("tool_calls"):
            raise NotRecorded("a message has tool calls, or is no object")
        role, content = message.get("role"), message.get("content")
        if isinstance(content, list):
            if not all(isinstance(x, dict) and isinstance(x.get("text"), str) for x in content):
                raise NotRecorded("a message has parts that are no text")
            content = "\n".join(part["text"] for part in content)
        if role not in ("system", "developer", "user", "assistant") or not isinstance(content, str):
            raise NotRecorded("a message has another role, or no text")
        if (role in ("user", "assistant") and not content.strip()) or not _is_unicode(content):
            raise NotRecorded("a message is empty, or is no Unicode")
        if len(content) > LONGEST_TEXT:
            raise NotRecorded(f"a message is longer than {LONGEST_TEXT:,} characters")
        messages.append({"role": role, "content": content})
    if not messages or messages[-1]["role"] != "user":
        raise NotRecorded("the last message is not from user")
    return messages


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
