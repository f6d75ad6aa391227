"""What a tokenizer's chat template makes of an example's messages.

A template is a program of others: it reads fields by names and in forms of its own, leaves out what
it does not know, and raises what it likes.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from decode.base.errors import UserError
from decode.model.chat_template import as_read
from train.data.read import Example
from train.data.row_kinds import REASONING, Message, short, without_thoughts

Messages = Sequence[Message]
WORD = re.compile(r"\w+")


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer has a chat template. A base model's tokenizer usually has none."""
    return bool(tokenizer.chat_template)


def reasoning_field(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The field from which the chat template reads an assistant's reasoning. None: from none."""
    templates = tokenizer.chat_template or ""
    text = "".join(templates.values()) if isinstance(templates, dict) else templates
    return next((name for name in REASONING if re.search(rf"[.'\"]{name}\b", text)), None)


def set_moment(tokenizer: PreTrainedTokenizerBase, moment: datetime) -> None:
    """Let the chat template write this date and time wherever it writes the current ones
    (`strftime_now`), so that all texts of a run are the same on every day."""
    tokenizer.moment = moment


def render_messages(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    example: Example,
    add_generation_prompt: bool = False,
) -> str:
    """What the chat template makes of messages, with the example's tools.

    Raises UserError if the template fails (it is a program of others, and raises what it likes), or
    if it leaves out what a user or the assistant wrote.
    """
    return _rendered(messages, tokenizer, example, add_generation_prompt=add_generation_prompt)[0]


def text_with_blocks(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, example: Example
) -> tuple[str, list[tuple[int, int]]]:
    """`render_messages`, and the beginning and end of each {% generation %} block in it."""
    text, blocks = _rendered(messages, tokenizer, example, return_assistant_tokens_mask=True)
    return text, list(blocks[0])


def render(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    example: Example,
    add_generation_prompt: bool = False,
) -> list[int]:
    """The token ids of `render_messages`."""
    return encode(render_messages(messages, tokenizer, example, add_generation_prompt), tokenizer)


def encode(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token ids of a text that has its special tokens already."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _rendered(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, example: Example, **options: Any
) -> tuple[str, Any]:
    """The text, and the blocks if they are asked for."""
    name = reasoning_field(tokenizer)
    if name and name != REASONING[0]:
        messages = [{name if k == REASONING[0] else k: v for k, v in m.items()} for m in messages]
    tools = list(example.tools) or None
    template = tokenizer.get_chat_template(tools=tools)
    moment = getattr(tokenizer, "moment", None)
    if moment is not None and "strftime_now" in template:
        template = _at(moment) + template
    # `apply_chat_template` leaves out a content that is null, but some templates write a call only
    # beside one.
    given = {"tools": tools, "chat_template": template, **tokenizer.special_tokens_map, **options}
    try:
        read = as_read(messages, tokenizer, tools)
        [text], blocks = render_jinja_template(conversations=[read], **given)
        lost = _lost(messages, text)
    except Exception as error:
        raise UserError(
            f"{example.source}: the tokenizer's chat template refuses the roles "
            f"{', '.join(m['role'] for m in messages)} ({type(error).__name__}: {error})"
        ) from error
    if lost is not None:
        message = messages[lost]
        raise UserError(
            f"{example.source}: the tokenizer's chat template leaves out the text of message "
            f"{lost} ({message['role']}: {short(message['content'])}); expected it in what the "
            "target reads. Leave the row out, or give the tokenizer a template that writes it"
        )
    return text, blocks


def _lost(messages: Messages, text: str) -> int | None:
    """The number of the first message of a user or the assistant whose text is not in what the
    template wrote. Templates may leave out reasoning, blanks, and the text beside a call."""
    found: set[str] | None = None
    for number, message in enumerate(messages):
        content = message["content"]
        if message["role"] not in ("user", "assistant") or "tool_calls" in message or not content:
            continue
        if content.strip() in text:
            continue
        # Some write it with other marks or blanks: then most of its words are there.
        words = WORD.findall(without_thoughts(content)) or [without_thoughts(content).strip()]
        if found is None:
            found = {*WORD.findall(text)}
        if sum(word in found for word in words) <= len(words) / 2 and any(words):
            return number
    return None


def _at(moment: datetime) -> str:
    """What a template begins with to write this moment as the current one: the values of all
    directives of `strftime`, with and without a leading zero."""
    letters = "aAbBcdfGHIjmMpSuUVwWxXyYzZ"
    values = {f"%{mark}{x}": moment.strftime(f"%{mark}{x}") for mark in "-" for x in "dHIjmMSyU"}
    values |= {f"%{x}": moment.strftime(f"%{x}") for x in letters}
    return (
        "{%- macro strftime_now(format) -%}{%- set written = namespace(text=format) -%}"
        f"{{%- for directive, value in {values!a}.items() -%}}"
        "{%- set written.text = written.text.replace(directive, value) -%}{%- endfor -%}"
        "{{- written.text -}}{%- endmacro -%}{{- '' }}"
    )


def tool_messages(example: Example) -> list[Message]:
    """The messages of a conversation that call a tool, or that a tool answered."""
    return [m for m in example.messages or () if m["role"] == "tool" or "tool_calls" in m]


def written(example: Example, tokenizer: PreTrainedTokenizerBase) -> Example | None:
    """The example in the first form in which the chat template writes its tool messages. None: it
    writes them in no form. Templates want the arguments of a call as an object or as its JSON, and
    the content beside a call empty or null."""
    if not tool_messages(example):
        return example
    if not has_template(tokenizer):
        return None
    for as_text in (False, True):
        for empty in ("", None):
            messages = tuple(_formed(m, as_text, empty) for m in example.messages or ())
            formed = replace(example, messages=messages)
            if _writes_tools(formed, tokenizer):
                return formed
    return None


def _formed(message: Message, as_text: bool, empty: str | None) -> Message:
    """The message with another form of its tool calls."""
    if "tool_calls" not in message:
        return message
    calls = message["tool_calls"]
    if as_text:
        functions = [call["function"] for call in calls]
        texts = [json.dumps(f["arguments"], ensure_ascii=False) for f in functions]
        calls = [
            call | {"function": function | {"arguments": text}}
            for call, function, text in zip(calls, functions, texts, strict=True)
        ]
    return message | {"tool_calls": calls, "content": message["content"] or empty}


def _writes_tools(example: Example, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template writes the example's tool messages as they are."""
    uses = tool_messages(example)
    try:
        text = render_messages(example.messages or (), tokenizer, example)
    except UserError:
        return False
    calls = [call["function"] for m in uses for call in m.get("tool_calls", ())]
    # A template that wants text writes an object as Python does.
    objects = [call["arguments"] for call in calls if isinstance(call["arguments"], dict)]
    if any(str(value) in text and str(value) != json.dumps(value) for value in objects):
        return False
    names = [call["name"] for call in calls]
    answers = [m["content"].strip() for m in uses if m["role"] == "tool"]
    # A template may write an answer as JSON, so its first word stands for it.
    return all(part in text for part in [*names, *(a.split()[0] for a in answers if a)])
