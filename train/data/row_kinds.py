"""Understands one row of a data file by its fields, whatever its source.

The first of these fields that is present and not null sets the kind of the row:

    messages        [{"role": "user", "content": "..."}, ...]    OpenAI's messages
    conversations   [{"from": "human", "value": "..."}, ...]     ShareGPT's turns
    prompt          "..."    a user message; `response`, `reference` or `completion`: its answer
    instruction     "..."    Alpaca's; `input` is added to it; `output` or `response`: its answer
    text            "..."    plain text to train on

`messages` and `conversations` may each have turns of either kind. Optional for all but `text`:

    system          "..."    a system message for a conversation that has none
    tools           [{"type": "function", "function": {...}}, ...]    definitions of the tools, as a
                    list or as its JSON; `functions` is the older name

Of a turn, the fields in `KEPT` and its tool calls are read. Its reasoning may also be named as in
`REASONING`.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from decode.base.errors import nearest
from train.measure.thinking_marks import MARKS

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
# How ShareGPT and its descendants name the roles in `from`.
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "function": "tool",
}
# The names of the field with an assistant's reasoning, in data and in chat templates. Here the
# first one is used.
REASONING = ("reasoning_content", "reasoning", "thinking")
# What is kept of a turn. Other fields, such as weights and annotations, are for other programs.
KEPT = ("role", "content", "name", "tool_call_id", REASONING[0])
# What begins and ends reasoning in an answer's text: in published models, and in data for others.
THOUGHTS = (
    *MARKS,
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("◁think▷", "◁/think▷"),
)
NESTED = 50  # how deep the objects of tools may be nested: templates write them recursively
CONVERSATIONS = ("messages", "conversations")
ANSWERS = {
    "prompt": ("response", "reference", "completion"),
    "instruction": ("output", "response"),
}
FIELDS = (*CONVERSATIONS, *ANSWERS, "text")
# What other data sets name a question and its answer. Rows with these names are refused, not read:
# the same names also stand for other things, such as classes or parts of a prompt.
QUESTIONS = ("question", "query", "input", "inputs", "problem", "user", "request")
OTHER_ANSWERS = ("answer", "output", "outputs", "solution", "assistant", "target", "reply")
KINDS = ("kind", "task")
TOOLS = ("tools", "functions")
# All that is read of a row.
READ = {*FIELDS, *(name for names in ANSWERS.values() for name in names), "input", "system"}
READ |= {*TOOLS, *KINDS, "id", "json_schema"}
EXPECTED = (
    '{"messages": [{"role": …, "content": …}]}, {"conversations": [{"from": …, "value": …}]}, '
    '{"prompt": …, "response": …}, {"instruction": …, "output": …} or {"text": …}'
)


class BadRow(Exception):
    """A row that cannot be used. reason: the key for counting it."""

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason
        self.problem = problem


class Content(NamedTuple):
    """What a row says: messages with the definitions of their tools, or text."""

    messages: tuple[Message, ...] | None
    text: str | None
    tools: tuple[dict[str, Any], ...] = ()


def understand(fields: Mapping[str, Any], keep_reasoning: bool) -> Content:
    """The content of a row from its fields that are not null. Checks structure and types, not the
    content. keep_reasoning: whether it is kept in the assistant's messages. Raises BadRow."""
    present = next((name for name in FIELDS if name in fields), None)
    if present is None:
        columns = ", ".join(map(short, fields)) or "no fields"
        raise BadRow("no known field", f"\n  found {columns}{_hint(fields)}\n  expected {EXPECTED}")
    if present == "text":
        return Content(None, string(fields, "text"))
    if present in CONVERSATIONS:
        messages = _conversation(fields[present], present, keep_reasoning)
    else:
        asked = string(fields, present)
        if present == "instruction" and fields.get("input"):
            asked += "\n\n" + string(fields, "input")
        messages = ({"role": "user", "content": asked},)
        answer = next((name for name in ANSWERS[present] if name in fields), None)
        if answer is not None:
            messages += ({"role": "assistant", "content": string(fields, answer)},)
    if fields.get("system") and messages[0]["role"] not in ("system", "developer"):
        messages = ({"role": "system", "content": string(fields, "system")}, *messages)
    if not keep_reasoning:
        messages = tuple(map(_without_reasoning, messages))
    listed = next((name for name in TOOLS if fields.get(name)), None)
    return Content(messages, None, _tools(fields[listed], listed) if listed else ())


def _hint(fields: Iterable[str]) -> str:
    """Which fields to rename in a row of no known kind, or the nearest known name, or ''."""
    asked = next((key for key in fields if key.lower() in QUESTIONS), None)
    if asked is None:
        # A low likeness would call an answer a conversation.
        near = (nearest(key, FIELDS, 0.7).strip() for key in fields)
        return next((f" ({name})" for name in near if name), "")
    answers = [key for key in fields if key.lower() in (*OTHER_ANSWERS, *ANSWERS["prompt"])]
    renamed = f'\n  rename {short(asked)} to "prompt"'
    if answers and answers[0] not in ANSWERS["prompt"]:
        renamed += f' and {short(answers[0])} to "response"'
    return renamed


def parse_line(line: bytes) -> dict[str, Any]:
    """The object in a line of JSON. Raises BadRow."""
    try:
        decoded = line.decode()
    except UnicodeDecodeError as error:
        raise BadRow(
            "not UTF-8",
            f"byte 0x{line[error.start]:02x} at column {error.start + 1} is not UTF-8; "
            f"expected a line of UTF-8 text",
        ) from error
    try:
        value = json.loads(decoded)
    # RecursionError: brackets nested thousands deep.
    except (ValueError, RecursionError) as error:
        raise BadRow("broken JSON", f"broken JSON ({error}); expected one JSON object") from error
    if not isinstance(value, dict):
        raise BadRow("broken JSON", f"found {short(value)}; expected one JSON object")
    return value


def string(fields: Mapping[str, Any], key: str, name: str = "", empty: bool = False) -> str:
    """The text of a field. Raises BadRow for another type, and for blank text unless `empty`."""
    value = fields[key]
    name = name or key
    if not isinstance(value, str):
        raise BadRow("wrong type", f"{name} is {short(value)}; expected text")
    if not empty and not value.strip():
        raise BadRow(f"empty {key}", f"{name} is empty; expected text")
    return clean(value, name)


def clean(value: str, name: str) -> str:
    """Refuse a lone surrogate: JSON can contain half a surrogate pair, but no tokenizer can encode
    it."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRow(
            "not UTF-8",
            f"{name} contains the lone surrogate \\u{ord(value[error.start]):04x}; expected text",
        ) from error
    return value


def short(value: Any) -> str:
    """A value's JSON, cut to a readable length for a message."""
    try:
        text = json.dumps(value, default=repr)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _conversation(value: Any, field: str, keep_reasoning: bool) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise BadRow(
            "wrong type", f"{field} is {short(value)}; expected a list of role and content"
        )
    messages = tuple(
        _message(turn, f"{field}[{i}]", keep_reasoning) for i, turn in enumerate(value)
    )
    if messages[0]["role"] == "assistant" or all(m["role"] != "user" for m in messages):
        raise BadRow(
            "no user message",
            f"the roles are {', '.join(m['role'] for m in messages)}; "
            f"expected a user message for the assistant to answer",
        )
    return messages


def _message(turn: Any, name: str, keep_reasoning: bool) -> Message:
    if not isinstance(turn, dict):
        raise BadRow(
            "wrong type", f"{name} is {short(turn)}; expected an object of role and content"
        )
    present = {key: value for key, value in turn.items() if value is not None}
    if "from" in present and "role" not in present:
        role = present.pop("from")
        present["role"] = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    if "value" in present and "content" not in present:
        present["content"] = present.pop("value")
    calls, where = _calls_of(present, name)
    if present.get("role") == "function":
        present["role"] = "tool"
    if calls:
        # Templates read a call's text from the same field as an answer's.
        present.setdefault("content", "")
    thoughts = {key: present.pop(key) for key in REASONING if key in present}
    if keep_reasoning and (key := next((key for key in thoughts if thoughts[key]), None)):
        thought = _text(thoughts[key], f"{name}.{key}")
        present[REASONING[0]] = string({key: thought}, key, f"{name}.{key}")
    for key in ("role", "content"):
        if key not in present:
            fields = [short(key) + (": null" if turn[key] is None else "") for key in turn]
            raise BadRow(
                "wrong type",
                f"{name} has {', '.join(fields) or 'no fields'}; expected role and content, or "
                "from and value",
            )
    if present["role"] not in ROLES:
        raise BadRow(
            "wrong type",
            f"{name} has the role {short(present['role'])}; expected {', '.join(ROLES)}",
        )
    present["content"] = _text(present["content"], f"{name}.content")
    # Only user and assistant need content: an empty system message is harmless, and an assistant
    # may call a tool instead.
    speaks = present["role"] in ("user", "assistant") and not calls
    message: Message = {
        key: string(present, key, f"{name}.{key}", empty=key != "content" or not speaks)
        for key in present
        if key in KEPT
    }
    if calls:
        message["tool_calls"] = _tool_calls(calls, where)
    return message


def _calls_of(present: dict[str, Any], name: str) -> tuple[Any, str]:
    """The tool calls of a turn, and where they are. A turn that is only a call gets its role."""
    # OpenAI's calls before there were tools, and those of ShareGPT.
    if not present.get("tool_calls") and "function_call" in present:
        return {"function": present["function_call"]}, f"{name}.function_call"
    if present.get("role") == "function_call" and isinstance(present.get("content"), str):
        where = f"{name}.value"
        calls = _parsed(present.pop("content"), where)
        present["role"] = "assistant"
        calls = calls if isinstance(calls, list) else [calls]
        return [{"function": call} for call in calls], where
    return present.get("tool_calls"), f"{name}.tool_calls"


def _without_reasoning(message: Message) -> Message:
    """The message without the reasoning that begins its content. Raises BadRow if nothing else is
    in it."""
    if message["role"] != "assistant":
        return message
    content = without_thoughts(message["content"])
    if not content and message["content"] and "tool_calls" not in message:
        raise BadRow(
            "only reasoning", f"{short(message['content'])} is reasoning without an answer"
        )
    return message | {"content": content}


def without_thoughts(content: str) -> str:
    """A content without the reasoning that begins it. The prompt may have opened that reasoning, so
    a mark that ends it is enough. Reasoning without an end was cut: nothing comes after it."""
    for begin, end in THOUGHTS:
        before, ended, rest = content.partition(end)
        opened = content.lstrip().startswith(begin)
        if opened or (ended and begin not in before):
            return without_thoughts(rest.lstrip())
    return content


def _text(value: Any, name: str) -> Any:
    """The text of a value that may be a list of parts. Other values stay as they are. Raises BadRow
    for a part that is no text, such as an image."""
    if not isinstance(value, list):
        return value
    texts = []
    for number, part in enumerate(value):
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str) or (isinstance(part, dict) and part.get("type") != "text"):
            raise BadRow(
                "content is not text",
                f'{name}[{number}] is {short(part)}; expected {{"type": "text", "text": …}}',
            )
        texts.append(text)
    return "".join(texts)


def _tool_calls(calls: Any, name: str) -> list[dict[str, Any]]:
    """Tool calls with the arguments as an object: chat templates expect it, OpenAI writes text."""
    result = []
    for number, call in enumerate(calls if isinstance(calls, list) else [calls]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(
                "wrong type",
                f'{name}[{number}] is {short(call)}; expected {{"function": {{"name": …, '
                '"arguments": …}}',
            )
        where = f"{name}[{number}].function.arguments"
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _parsed(arguments or "{}", where)
        kept = {key: call[key] for key in ("id", "type") if isinstance(call.get(key), str)}
        arguments = _object({} if arguments is None else arguments, where)
        result.append(kept | {"function": {"name": function["name"], "arguments": arguments}})
    return result


def _tools(value: Any, name: str) -> tuple[dict[str, Any], ...]:
    """Definitions of tools, as chat templates expect them."""
    if isinstance(value, str):
        value = _parsed(value, name)
    if not isinstance(value, list):
        raise BadRow("wrong type", f"{name} is {short(value)}; expected a list of objects")
    tools = []
    for number, tool in enumerate(value):
        tool = _object(tool, f"{name}[{number}]")
        tools.append({"type": "function", "function": tool} if "name" in tool else tool)
    return tuple(tools)


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRow("broken JSON", f"{name} is no JSON ({error}); expected an object") from error


def _object(value: Any, name: str) -> dict[str, Any]:
    """Refuse what a chat template cannot write as a JSON object: other types, numbers that are not
    finite, half a character, and objects that are nested too deep."""
    if not isinstance(value, dict):
        raise BadRow("wrong type", f"{name} is {short(value)}; expected an object")
    if not _is_flat(value, NESTED):
        raise BadRow("broken JSON", f"{name} is nested more than {NESTED} levels deep")
    try:
        clean(json.dumps(value, allow_nan=False, ensure_ascii=False), name)
    except (ValueError, TypeError) as error:
        raise BadRow("broken JSON", f"{name} cannot be written as JSON ({error})") from error
    return value


def _is_flat(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested at most `levels` deep."""
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_flat(part, levels - 1) for part in inner)
