"""What a tokenizer's chat template makes of an example's messages.

A template is a program of others: it reads fields by names and in forms of its own, leaves out what
it does not know, and raises what it likes.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from decode.base.errors import UserError
from train.data.read import Example
from train.data.row_kinds import REASONING, Message

Messages = Sequence[Message]


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer has a chat template. A base model's tokenizer usually has none."""
    return bool(tokenizer.chat_template)


def reasoning_field(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The field from which the chat template reads an assistant's reasoning. None: from none."""
    templates = tokenizer.chat_template or ""
    text = "".join(templates.values()) if isinstance(templates, dict) else templates
    return next((name for name in REASONING if re.search(rf"[.'\"]{name}\b", text)), None)


def apply(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, example: Example, **options: Any
) -> Any:
    """What the chat template makes of messages, with the example's tools. Raises UserError if it
    fails: a template is a program of others, and raises what it likes."""
    name = reasoning_field(tokenizer)
    if name and name != REASONING[0]:
        messages = [{name if k == REASONING[0] else k: v for k, v in m.items()} for m in messages]
    tools = list(example.tools) or None
    has_null = any(message["content"] is None for message in messages)
    try:
        if has_null:
            return _apply_with_null(messages, tokenizer, tools, **options)
        return tokenizer.apply_chat_template(list(messages), tools=tools, **options)
    except Exception as error:
        raise UserError(
            f"{example.source}: the tokenizer's chat template refuses the roles "
            f"{', '.join(m['role'] for m in messages)} ({type(error).__name__}: {error})"
        ) from error


def _apply_with_null(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    tools: list[dict[str, Any]] | None,
    **options: Any,
) -> Any:
    """As `apply_chat_template`, which leaves a content out that is null. Some templates write a
    call only beside a content that is null."""
    [text], _ = render_jinja_template(
        conversations=[list(messages)],
        tools=tools,
        chat_template=tokenizer.get_chat_template(tools=tools),
        add_generation_prompt=options.get("add_generation_prompt", False),
        **tokenizer.special_tokens_map,
    )
    return tokenizer(text, add_special_tokens=False) if options.get("tokenize", True) else text


def render(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    example: Example,
    add_generation_prompt: bool = False,
) -> list[int]:
    """The token ids of `apply`."""
    options = {"add_generation_prompt": add_generation_prompt, "return_dict": True}
    return list(apply(messages, tokenizer, example, **options)["input_ids"])


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
        text = str(apply(example.messages or (), tokenizer, example, tokenize=False))
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
