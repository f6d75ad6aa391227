"""Reads a request for a chat and its answer, and keeps those that are text of the target alone."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from draftsmith.net.events import DONE, read_events

# What a request may have, with any value: names and limits, how the answer is sent, and how a token
# is drawn from the target's distribution. Anything else may write the prompt in another way, choose
# other weights, or bend, cut or hide the answer, and engines get new fields with each version.
FREE = frozenset(
    (
        *("messages", "model", "store", "user", "safety_identifier", "metadata", "service_tier"),
        *("stream", "stream_options", "n", "seed", "max_tokens", "max_completion_tokens"),
        *("temperature", "top_p", "top_k", "min_p", "logprobs", "top_logprobs"),
        *("prompt_cache_key", "prompt_cache_retention", "draftsmith"),
        # vLLM, SGLang, llama-server
        *("request_id", "priority", "cache_salt", "return_token_ids", "prompt_logprobs"),
        *("return_tokens_as_token_ids", "rid", "cache_prompt", "id_slot", "timings_per_token"),
    )
)
# What a key of a message may have that says nothing.
EMPTY: tuple[Any, ...] = (None, "", [], {})
# What it may have with one of these values, which ask for nothing. null always asks for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("tools", "functions", "documents", "bad_words", "stop_token_ids"), ([],)),
    **dict.fromkeys(("lora", "logits_processors"), ([],)),
    **dict.fromkeys(("logit_bias", "chat_template_kwargs", "structured_outputs"), ({},)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_tokens"), (0,)),
    **dict.fromkeys(("xtc_probability", "dry_multiplier", "dynatemp_range", "mirostat"), (0,)),
    **dict.fromkeys(("repetition_penalty", "repeat_penalty", "length_penalty"), (1,)),
    **dict.fromkeys(("typical_p", "best_of"), (1,)),
    **dict.fromkeys(("ignore_eos", "use_beam_search", "echo", "continue_final_message"), (False,)),
    **dict.fromkeys(("include_stop_str_in_output", "no_stop_trim"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("include_reasoning", "separate_reasoning"), (True,)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    "parallel_tool_calls": (True, False),
    "add_generation_prompt": (True,),
    "response_format": ({}, {"type": "text"}),
    "modalities": (["text"],),
    "stop": ("", []),
    "grammar": ("",),
}
PART = {"type", "text", "cache_control"}  # what a part of a message may have
HOTTEST = 1.0  # a text that is drawn at a higher temperature is not one that the target writes
SHOWN = 5  # names in one reason
NAME = re.compile(r"[A-Za-z0-9_]{1,40}")  # of a field, to be shown; others are what a client wrote

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
    calls or reasoning or of a lossy rule, for requests with images, and for those with a field that
    is neither in FREE nor neutral.
    """
    messages = _messages(body.get("messages"))
    unknown = {_shown(name) for name, value in body.items() if not _leaves_alone(name, value)}
    if unknown:
        raise NotRecorded(f"the request has {', '.join(sorted(unknown)[:SHOWN])}")
    part = "delta" if stream else "message"
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    try:
        chunks = list(_chunks(answer)) if stream else [json.loads(answer)]
        if any(map(_hides_reasoning, chunks)):
            raise NotRecorded("the answer has reasoning that is not shown")
        if any(map(_is_lossy, chunks)):
            raise NotRecorded("a lossy rule may have changed the answer")
        for choice, index, message in (one for chunk in chunks for one in _choices(chunk, part)):
            spoken = {key for key, value in message.items() if value} - {"role", "content"}
            if spoken:  # reasoning, a tool call, a refusal
                raise NotRecorded(f"the answer has {', '.join(sorted(spoken))[:80]}")
            content = message.get("content") or ""
            if content and index in ends:
                raise ValueError("the answer goes on behind its end")
            texts[index] = texts.get(index, "") + content
            if choice.get("finish_reason") is not None:
                ends[index] = _end(choice)
    except (ValueError, RecursionError):
        raise NotRecorded("the answer is not complete, or has another shape") from None
    if not texts:
        raise NotRecorded("the answer has no choices")
    if len({str(chunk["model"]) for chunk in chunks if chunk.get("model")}) > 1:
        raise NotRecorded("the answer is of several models")
    request, model = str(chunks[0].get("id", "")), str(chunks[0].get("model", ""))
    found, left_out = [], Counter[str]()
    for index, text in sorted(texts.items()):
        reason = _reason_against(text, ends.get(index))
        if reason is None:
            found.append(Exchange(request, model, messages, text))
        else:
            left_out[reason] += 1
    return found, left_out


def _leaves_alone(name: str, value: Any) -> bool:
    """Whether a field of a request leaves prompt and answer as the target writes them."""
    if name == "temperature" and value is not None:
        return isinstance(value, int | float) and 0 <= value <= HOTTEST
    return name in FREE or value is None or value in NEUTRAL.get(name, ())


def _shown(name: str) -> str:
    return name if NAME.fullmatch(name) else "a field with another name"


def _hides_reasoning(chunk: Any) -> bool:
    """Whether an answer, or an event of one, counts reasoning that it may not have."""
    usage = chunk.get("usage") if isinstance(chunk, dict) else None
    if not isinstance(usage, dict):
        return False
    details = usage.get("completion_tokens_details")
    counted = details.get("reasoning_tokens") if isinstance(details, dict) else None
    return bool(counted or usage.get("reasoning_tokens"))


def _is_lossy(chunk: Any) -> bool:
    """Whether `draftsmith serve` says of an answer that another law than the target's drew it."""
    ours = chunk.get("draftsmith") if isinstance(chunk, dict) else None
    return isinstance(ours, dict) and bool(ours.get("lossy"))


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
        # A template may write them into the prompt: a name, earlier reasoning, a beginning to go
        # on with, a number that is 0.
        said = {name for name, x in message.items() if x not in EMPTY}
        more = set(map(_shown, said - {"role", "content"}))
        if more:
            raise NotRecorded(f"a message has {', '.join(sorted(more)[:SHOWN])}")
        role, content = message.get("role"), message.get("content")
        if isinstance(content, list):
            if not all(map(_is_text, content)):
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


def _is_text(part: Any) -> bool:
    """Whether a part of a message is text. Engines read a part without a type by its other keys."""
    known = isinstance(part, dict) and part.get("type", "text") == "text"
    return known and isinstance(part.get("text"), str) and not any(map(part.get, {*part} - PART))


def _choices(chunk: Any, part: str) -> Iterator[tuple[dict[str, Any], int, dict[str, Any]]]:
    """Each choice of an answer or of one event, with its index and what it says. part: the key of
    that. Raises ValueError for anything that is not in this shape."""
    if isinstance(chunk, dict) and chunk.get("error"):
        raise ValueError("it is an error")
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


def _chunks(answer: bytes) -> Iterator[Any]:
    """The JSON of a stream's events. Raises ValueError if the stream did not end with [DONE]."""
    for data in read_events(answer):
        if data == DONE:
            return
        yield json.loads(data)
    raise ValueError("the stream has no end")


def _is_unicode(text: str) -> bool:
    """JSON can hold half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
