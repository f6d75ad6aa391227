"""Tools of a chat: how a target writes its calls, and the calls in an answer.

A call's format is the chat template's. A new format is a row of `FORMATS`. A tokenizer with a
`response_template` is read by transformers instead.

The parsers of vLLM 0.32 (those of 0.33 are the same files) and SGLang 0.5.23 were tried on 97 texts
in these formats, whole and in pieces. They differ from each other and from this one, which keeps to
these rules:

- A complete call is delivered whatever else the answer has. There, one that is not JSON, or an end
  mark inside an argument, makes text of all calls.
- No text is lost. There, text behind a call, calls of functions that the request does not have, and
  what may have become a mark are dropped, whole or in streams.
- A call of a function that is not in the request is text. vLLM delivers it.
- Arguments stay as they are written; there they are written anew. `null` is `{}`, and JSON that is
  written as a string is read.
- Behind a mark a name is enough, as in SGLang. Without one it may be an answer in JSON.
- Lists, a call without its end mark, and several calls behind one mark are read.
- JSON is JSON: no `NaN`, and no single quotes, which SGLang reads for Llama.
- Reasoning has no calls. There another parser has to take it out first.
"""

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from decode.text_stream import begun, decode, special_ids
from draftsmith.net.api_error import ApiError
from draftsmith.serve.openai.formats import AskedGrammar
from draftsmith.serve.openai.known_fields import unfit

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MOST_TOOLS = 128
_KEYS = ("arguments", "parameters")  # models write both, whatever their template says
_SPACE = re.compile(r"\s*")
# What may become a call as the text goes on, behind a mark.
_MAY_BEGIN = re.compile(r"[\s\[]*(\{\s*(\"|\Z)|\Z)")
_THINKS, _THOUGHT = "<think>", "</think>"
_GROWTH = 8  # a text that is held back is read again when it is longer by an eighth
_TAIL = 16  # tokens of a prompt that show how it ends


@dataclass(frozen=True)
class CallFormat:
    """How calls are written.

    template: what the chat templates of such targets contain. begins: what is before a call or a
    list of calls, for certain: a pattern. before, opens, closes, between, after: what is written
    before all calls, around each, between two and after all; between None: there is one call.
    marks: what is no JSON in it. joins: what may be between two calls without a mark before the
    second: a pattern. ends: what belongs to the calls behind the last one: a pattern. arguments:
    the key of the arguments.
    """

    template: str
    begins: str
    before: str
    opens: str
    closes: str
    between: str | None
    after: str
    marks: tuple[str, ...]
    joins: str
    ends: str
    arguments: str


_BRACKET = r"\[(?!TOOL_CALLS\])"
FORMATS = (
    # Hermes, Qwen2.5 and Qwen3; GLM writes <tool_call>{name} and no JSON.
    CallFormat(
        r"<tool_call>(\\n|\s)*\{\\?[\"']name\b", r"<tool_call>[\s\[]*",
        "", "<tool_call>\n", "\n</tool_call>", "\n", "",
        ("<tool_call>", "</tool_call>"), r"\s*,?\s*", r"\s*\]?\s*</tool_call>", "arguments",
    ),
    # Mistral and Mixtral, before [ARGS]. A list at the beginning needs no mark.
    CallFormat(
        # A bracket may also begin the next mark.
        r"\[TOOL_CALLS\](?!.*\[ARGS\])",
        rf"\[TOOL_CALLS\](\s|{_BRACKET})*|\A\s*{_BRACKET}\s*",
        "[TOOL_CALLS][", "", "", ", ", "]",
        ("[TOOL_CALLS]",), rf"[\s\]]*[,;]?(\s|{_BRACKET})*", r"\s*\]", "arguments",
    ),
    # Llama 3.1 to 3.3: objects, with a mark or without one.
    CallFormat(
        r'"parameters":', r"<\|python_tag\|>[\s\[]*|\A\s*\[\s*|(?=\{)",
        "", "", "", None, "",
        ("<|python_tag|>",), r"\s*[,;]?\s*", r"\s*\](?=\s*\Z)", "parameters",
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
        written = self._written
        rules = [f"call: {written(one.opens)} ({' | '.join(bodies)}) {written(one.closes)}"]
        more = f" ({written(one.between)} call)*" if self._parallel and one.between else ""
        rules += [f"start: {written(one.before)} call{more} {written(one.after)}"]
        for at, name in enumerate(self._names):
            spaced = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
            schema = {"type": "object"} | (self._functions[name].get("parameters") or {})
            rules.append(f"a{at}: %json {json.dumps(schema | {'x-guidance': spaced})}")
        return "\n".join(rules)

    def _written(self, text: str) -> str:
        """A text in a Lark grammar, with each mark that is a special token as that token."""
        special = self._special_marks
        if not special:
            return _quoted(text)
        parts = re.split(f"({'|'.join(map(re.escape, special))})", text)
        return " ".join(f"<[{special[x]}]>" if x in special else _quoted(x) for x in parts)

    @property
    def _special_marks(self) -> dict[str, int]:
        """The format's marks that are special tokens."""
        marks = () if self._format is None else self._format.marks
        ids = {mark: self._tokenizer.convert_tokens_to_ids(mark) for mark in marks}
        special = special_ids(self._tokenizer)
        # A mark that is no token gets the id of the unknown token, which is special.
        named = self._tokenizer.convert_ids_to_tokens
        return {mark: i for mark, i in ids.items() if i in special and named(i) == mark}

    @property
    def shown(self) -> frozenset[int]:
        """The special tokens that an answer has to be read with: marks of calls."""
        return frozenset() if self._by_library else frozenset(self._special_marks.values())

    def certain(self, text: str, begin: int) -> int:
        """How many first characters of an answer so far are text for certain, and no call. begin:
        of how many this is known."""
        if self._by_library:
            return 0
        one, end = self._format, len(text)
        assert one is not None
        for found in self._found(text, begin):
            if found.calls or found.may_be:
                end = found.mark
                break
        else:
            end -= max(begun(text, mark) for mark in one.marks)
        return begin + len(text[begin:end].rstrip())

    def read(
        self, text: str, prompt: Sequence[int], tokens: Sequence[int]
    ) -> tuple[str, list[tuple[str, str]]]:
        """(the text around the calls, the calls: names and arguments as JSON, as they are written).
        A call that is not complete, or of a function that is not there, is text. Reasoning has no
        calls. prompt, tokens: as ids."""
        if self._by_library:
            content, calls = self._by_template(text, prompt, tokens)
            if any(name not in self._functions for name, _ in calls):
                return text, []
        else:
            content, calls = self._by_format(text, prompt)
        return (content, calls if self._parallel else calls[:1]) if calls else (text, [])

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

    def _by_format(self, text: str, prompt: Sequence[int]) -> tuple[str, list[tuple[str, str]]]:
        content, calls, at = "", list[tuple[str, str]](), 0
        for found in self._found(text, self.thought(prompt).end(text)):
            if found.calls:
                between = text[at : found.begin].rstrip()
                content += between if content or not at else between.lstrip()
                calls += found.calls
                at = found.end
        rest = text[at:] if text[at:].strip() else ""
        return content + (rest if content else rest.lstrip()), calls

    def thought(self, prompt: Sequence[int]) -> "Thought":
        """The reasoning of an answer to this prompt. A template may have begun it there."""
        last = decode(self._tokenizer, prompt[-_TAIL:], skip_special_tokens=False)
        return Thought(last.rstrip().endswith(_THINKS))

    def _found(self, text: str, begin: int) -> Iterator["_Found"]:
        """The places from `begin` on that look like calls, in order."""
        one = self._format
        assert one is not None
        begins, joins, ends = map(re.compile, (one.begins, one.joins, one.ends))
        while mark := begins.search(text, begin):
            first, at = mark.start(), mark.end()
            end, calls = max(at, first + 1), list[tuple[str, str]]()
            may_be = bool(_MAY_BEGIN.match(text, at))
            is_marked = any(sign in mark[0] for sign in one.marks)
            while (read := _object(text, at)) is not None:
                call = self._call(read[0], is_marked)
                if call is None and not is_marked:
                    may_be, end = False, end if calls else read[1]
                    break
                join = joins.match(text, read[1])
                at = join.end() if join else read[1]
                if call is not None:
                    may_be, end = False, read[1]
                    calls.append(call)
                    continue
                if calls:
                    yield _Found(first, end, calls, False, mark.start())
                first, end, calls = at, at, []
                may_be = bool(_MAY_BEGIN.match(text, at))
            if calls and (closing := ends.match(text, end)):
                end = closing.end()
            yield _Found(first, end, calls, may_be, mark.start())
            begin = end

    def _call(self, members: Mapping[str, str], is_marked: bool) -> tuple[str, str] | None:
        """The call that an object is, given by the JSON of its members. None: it is none.
        is_marked: it stands behind a mark, so that a name is enough."""
        name = _JSON.decode(members.get("name", "null"))
        found = [members[key] for key in _KEYS if key in members]
        if not isinstance(name, str) or name not in self._functions or not (found or is_marked):
            return None
        given = next((one for one in found if one != "null"), "{}")
        if given.startswith('"'):  # some models write the JSON of the arguments as a string
            inner = str(json.loads(given))
            read = _object(inner, len(inner) - len(inner.lstrip()))
            return name, inner if read is not None and not inner[read[1] :].strip() else given
        return name, given


class Thought:
    """The reasoning that an answer may begin with. begun: in the prompt."""

    def __init__(self, begun: bool) -> None:
        self._begun, self._searched = begun, 0
        self._end: int | None = None

    def end(self, text: str) -> int:
        """Where it ends; 0 if there is none, or it has not ended. text: the answer so far, which
        only grows from call to call: what was searched is not searched again."""
        if self._end is None and (at := text.find(_THOUGHT, self._searched)) >= 0:
            begun = self._begun or text.lstrip().startswith(_THINKS)
            self._end = at + len(_THOUGHT) if begun else 0
        self._searched = max(len(text) - len(_THOUGHT) + 1, 0)
        return self._end or 0


class CallText:
    """The text of one answer as it grows, without its calls, which are given at its end. calls:
    read it. prompt: as ids."""

    def __init__(self, calls: Calls, prompt: Sequence[int]) -> None:
        self._calls, self._prompt, self._thought = calls, prompt, calls.thought(prompt)
        self.text, self._given, self._due = "", 0, 0

    def add(self, piece: str) -> str:
        """The next text that is no call for certain."""
        text, self.text = self.text, ""
        text += piece  # in place: nothing else holds it
        self.text = text
        if len(text) < self._due:
            return ""
        begin = self._given
        self._given = self._calls.certain(text, max(begin, self._thought.end(text)))
        # What is held back is read again once it has grown by a share of its length. So a long
        # call in tiny pieces is read a few times, not once for each piece.
        self._due = len(text) + (len(text) - self._given) // _GROWTH
        return text[begin : self._given]

    def end(self, piece: str, tokens: Sequence[int]) -> tuple[str, list[tuple[str, str]]]:
        """The rest of the text, and the calls. tokens: of the whole answer."""
        content, calls = self._calls.read(self.text + piece, self._prompt, tokens)
        return content[self._given :], calls


class _Found(NamedTuple):
    """A place that looks like calls, from `begin` to `end`. may_be: without calls so far, it may
    get some as the text goes on. mark: where the mark before it begins. In a list, objects that are
    no calls may stand between the two: they are text."""

    begin: int
    end: int
    calls: list[tuple[str, str]]
    may_be: bool
    mark: int


def _object(text: str, at: int) -> tuple[dict[str, str], int] | None:
    """The JSON object that begins there: the JSON of each member as it is written, and where the
    object ends. None: none begins there, or it is not complete."""
    members: dict[str, str] = {}
    if not text.startswith("{", at):
        return None
    try:
        _, end = _JSON.raw_decode(text, at)
        at += 1
        while text[at := _past_space(text, at)] != "}":
            key, at = _JSON.raw_decode(text, at)
            at = _past_space(text, _past_space(text, at) + 1)  # the colon
            _, last = _JSON.raw_decode(text, at)
            members[key] = text[at:last]
            at = _past_space(text, last)
            at += text[at] == ","
    except (ValueError, RecursionError):
        return None
    return members, end


def _past_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


# Numbers stay as they are written; Python makes none of more than 4,300 digits.
_JSON = json.JSONDecoder(parse_constant=_no_number, parse_int=str, parse_float=str)


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
