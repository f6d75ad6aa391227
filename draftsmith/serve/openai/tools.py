"""Tools of a chat: how a target writes its calls, and the calls in an answer.

A call's format is the chat template's. A new format is a row of `FORMATS`. A tokenizer with a
`response_template` is read by transformers instead.
"""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftsmith.serve.openai.api_errors import ApiError, unfit
from draftsmith.serve.openai.formats import AskedGrammar

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MOST_TOOLS = 128
# What stands between the JSON objects of calls.
_BETWEEN = " \r\n\t[],;"


@dataclass(frozen=True)
class CallFormat:
    """How calls are written.

    template: what the chat templates of such targets contain. begins: what a text is before its
    first call: a pattern. anywhere: calls may follow other text. before, opens, closes, between,
    after: what is written before all calls, around each, between two and after all; between None:
    there is one call. marks: what is no JSON in it. arguments: the key of the arguments.
    """

    template: str
    begins: str
    anywhere: bool
    before: str
    opens: str
    closes: str
    between: str | None
    after: str
    marks: tuple[str, ...]
    arguments: str


FORMATS = (
    # Hermes, Qwen2.5 and Qwen3; GLM writes <tool_call>{name} and no JSON.
    CallFormat(
        r"<tool_call>(\\n|\s)*\{\\?[\"']name\b", r"<tool_call>", True, "",
        "<tool_call>\n", "\n</tool_call>", "\n", "",
        ("<tool_call>", "</tool_call>"), "arguments",
    ),
    # Mistral and Mixtral, before [ARGS].
    CallFormat(
        r"\[TOOL_CALLS\](?!.*\[ARGS\])", r"\s*(\[TOOL_CALLS\]\s*)?\[\s*\{", False, "[TOOL_CALLS][",
        "", "", ", ", "]", ("[TOOL_CALLS]",), "arguments",
    ),
    # Llama 3.1 to 3.3.
    CallFormat(
        r'"parameters":', r"\s*(<\|python_tag\|>)?\s*\{", False, "", "", "", None, "",
        ("<|python_tag|>",), "parameters",
    ),
)  # fmt: skip


def read_tools(value: Any) -> list[dict[str, Any]]:
    """OpenAI's `tools` of chats: functions. Raises ApiError for the first fault."""
    if not isinstance(value, list) or len(value) > MOST_TOOLS:
        raise unfit("tools", value, f"a list of at most {MOST_TOOLS} functions")
    return [_tool(one, f"tools.{at}") for at, one in enumerate(value)]


def read_flat_tools(value: Any) -> list[dict[str, Any]]:
    """OpenAI's `tools` of responses, as chats write them: there a function has no object of its
    own. Raises ApiError for the first fault."""
    return read_tools(list(map(_nested, value)) if isinstance(value, list) else value)


def read_tool_choice(value: Any) -> str | tuple[str]:
    """'auto', 'none', 'required', or the one name of a function in a tuple."""
    match value:
        case "auto" | "none" | "required":
            return str(value)
        case {"type": "function", "function": {"name": str(name)}}:
            return (name,)
    raise unfit("tool_choice", value, '"auto", "none", "required", or a function by its name')


def read_flat_choice(value: Any) -> str | tuple[str]:
    """The `tool_choice` of responses, as `read_tool_choice` gives it."""
    return read_tool_choice(_nested(value))


def _nested(value: Any) -> Any:
    """A function of responses as chats write it. Anything else stays."""
    match value:
        case {"type": "function", "name": str(), **rest}:
            return {"type": "function", "function": {**rest, "name": value["name"]}}
    return value


def _tool(value: Any, path: str) -> dict[str, Any]:
    match value:
        case {"type": "function", "function": {"name": str(name), **rest}}:
            pass
        case _:
            raise unfit(path, value, 'a function: {"type": "function", …} with name and parameters')
    if not NAME.fullmatch(name):
        expected = "1 to 64 letters, digits, _ and -"
        raise unfit(f"{path}.function.name", name, expected)
    if not isinstance(rest.get("parameters") or {}, dict):
        raise unfit(f"{path}.function.parameters", rest["parameters"], "a JSON schema, an object")
    known = {key: x for key in ("description", "parameters") if (x := rest.get(key)) is not None}
    return {"type": "function", "function": {"name": name, **known}}


def call_ids(calls: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Calls as OpenAI writes them. An id has nine letters: Mistral's templates take no others."""
    return [
        {
            "id": uuid.uuid4().hex[:9],
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for name, arguments in calls
    ]


class Calls:
    """Reads the calls of the answers to one request.

    tools: those of the request. choice: as `read_tool_choice` gives it. parallel: False: at most
    one call. Raises ApiError if the chat template knows no tools, and if its format of calls is not
    known.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Mapping[str, Any]],
        choice: str | tuple[str],
        parallel: bool,
    ) -> None:
        self._tokenizer, self._tools, self._parallel = tokenizer, list(tools), parallel
        self._functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        template = str(tokenizer.chat_template)
        require_tools(tokenizer, "tools")
        self._by_library = getattr(tokenizer, "response_template", None) is not None
        fitting = (x for x in FORMATS if re.search(x.template, template, re.DOTALL))
        self._format = next(fitting, None)
        forced = choice not in ("auto", "none")
        if self._format is None and (forced or not self._by_library):
            message = (
                "the target's chat template knows tools, but not in a format of calls that this "
                "service knows; leave tools out"
            )
            raise ApiError(400, message, param="tools", code="unsupported_value")
        self._names = list(choice) if isinstance(choice, tuple) else list(self._functions)
        self.forced = AskedGrammar("tool_choice", "lark", self._lark()) if forced else None

    def _lark(self) -> str:
        """The grammar of one call or several, each with arguments of its function's schema."""
        one = self._format
        assert one is not None
        heads = [f'{{"name": "{name}", "{one.arguments}": ' for name in self._names]
        bodies = [f"{_quoted(head)} a{at} {_quoted('}')}" for at, head in enumerate(heads)]
        rules = [f"call: {_quoted(one.opens)} ({' | '.join(bodies)}) {_quoted(one.closes)}"]
        more = f" ({_quoted(one.between)} call)*" if self._parallel and one.between else ""
        rules += [f"start: {self._before(one)} call{more} {_quoted(one.after)}"]
        for at, name in enumerate(self._names):
            spaced = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
            schema = {"type": "object"} | (self._functions[name].get("parameters") or {})
            rules.append(f"a{at}: %json {json.dumps(schema | {'x-guidance': spaced})}")
        return "\n".join(rules)

    def _before(self, one: CallFormat) -> str:
        """What is before all calls, with its mark as a token of its own if it is a special one."""
        text, mark = one.before, one.marks[0]
        token = self._tokenizer.convert_tokens_to_ids(mark)
        if not text.startswith(mark) or token not in self._tokenizer.all_special_ids:
            return _quoted(text)
        return f"<[{token}]> {_quoted(text.removeprefix(mark))}"

    def certain(self, text: str) -> int:
        """How many first characters of an answer so far are text for certain, and no call."""
        if self._by_library:
            return 0
        one = self._format
        assert one is not None
        if not one.anywhere:
            may_be_call = text.lstrip()[:1] in ("", "[", "{", "<")
            return 0 if may_be_call else len(text)
        mark = one.marks[0]
        at = text.find(mark)
        end = at if at >= 0 else len(text) - begun(text, mark)
        return len(text[:end].rstrip())

    def read(
        self, text: str, prompt: Sequence[int], tokens: Sequence[int]
    ) -> tuple[str, list[tuple[str, str]]]:
        """(the text before the calls, the calls: names and arguments as JSON). A call that is not
        complete, or of a function that is not there, is text. prompt, tokens: as ids."""
        if self._by_library:
            content, calls = self._by_template(text, prompt, tokens)
        else:
            content, calls = self._by_format(text)
        if not calls or any(name not in self._functions for name, _ in calls):
            return text, []
        return content, calls if self._parallel else calls[:1]

    def _by_template(
        self, text: str, prompt: Sequence[int], tokens: Sequence[int]
    ) -> tuple[str, list[tuple[str, str]]]:
        try:
            said = self._tokenizer.parse_response(
                list(tokens), prefix=list(prompt), tools=self._tools
            )
            found = [call["function"] for call in said.get("tool_calls") or []]
            calls = [(str(x["name"]), _as_json(x["arguments"])) for x in found]
        except (ValueError, KeyError, TypeError):
            return text, []
        return str(said.get("content") or ""), calls

    def _by_format(self, text: str) -> tuple[str, list[tuple[str, str]]]:
        one = self._format
        assert one is not None
        found = (re.search if one.anywhere else re.match)(one.begins, text)
        if found is None:
            return text, []
        rest, calls, reads = text[found.start() :], [], json.JSONDecoder().raw_decode
        for mark in one.marks:
            rest = rest.replace(mark, " ")
        try:
            while rest := rest.lstrip(_BETWEEN):
                call, end = reads(rest)
                calls.append((str(call["name"]), _as_json(call[one.arguments])))
                rest = rest[end:]
        except (ValueError, KeyError, TypeError, RecursionError):
            return text, []
        return text[: found.start()].rstrip(), calls


def begun(text: str, string: str) -> int:
    """The length of the longest end of a text that a string begins with.

    >>> begun("to be or", "or not")
    2
    """
    longest = min(len(string) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)


def require_tools(tokenizer: PreTrainedTokenizerBase, param: str) -> None:
    """Raise ApiError unless the chat template knows tools and their calls."""
    if "tool" not in str(tokenizer.chat_template):
        message = "the target's chat template knows no tools; leave them out, or use another target"
        raise ApiError(400, message, param=param, code="unsupported_value")


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _quoted(text: str) -> str:
    """A text in a Lark grammar; '' is nothing."""
    return json.dumps(text, ensure_ascii=False) if text else ""
