"""Requests of /v1/messages: texts, calls of tools and their results, in blocks."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from decode.text import Prompt
from draftsmith.serve.openai.fields import REFUSED, ignored_by, unsupported
from draftsmith.serve.openai.formats import AskedGrammar
from draftsmith.serve.openai.known_fields import KnownFields, RequestPart, unfit, validated
from draftsmith.serve.openai.messages import read_stops, read_text
from draftsmith.serve.openai.text_request import FUNCTIONS, TEXTS, Tooled
from draftsmith.serve.openai.tools import read_tools

TOLD_OF_ALL = {"defer_loading": (False,), "allowed_callers": (["direct"],)}
_CACHE = {"cache_control": "the prefix cache needs no advice"}


class TextBlock(RequestPart):
    type: Literal["text"]
    text: str


class UseBlock(RequestPart):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ResultBlock(RequestPart):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[Any, WithJsonSchema({"title": "text or a list of blocks of text"})] = ""
    is_error: bool = False


class FunctionTool(RequestPart):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] = "custom"


class ToolChoice(RequestPart):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


TEXT = KnownFields(TextBlock, {**_CACHE, "citations": "comes back from earlier answers"})
USE = KnownFields(
    UseBlock, {**_CACHE, **dict.fromkeys(("caller", "toolset_name"), "comes back from answers")}
)
RESULT = KnownFields(ResultBlock, {**_CACHE, "toolset_name": "comes back from answers"})
TOOL = KnownFields(
    FunctionTool,
    {
        **_CACHE,
        "strict": "a forced call has the schema in any case",
        "eager_input_streaming": "calls come whole",
        "input_examples": "templates of chats have no examples of calls",
    },
    {"all tools are in the prompt, for the model alone": TOLD_OF_ALL},
)
CHOSEN = KnownFields(ToolChoice)


def read_turns(value: Any) -> list[dict[str, Any]]:
    """The messages of a request, as chats have them: what tools answered becomes messages of its
    own, before the text beside it, and turns of one side that follow each other are one."""
    if not isinstance(value, list) or not value:
        raise unfit("messages", value, "a list of messages")
    turns = list[dict[str, Any]]()
    for said in (said for at, one in enumerate(value) for said in _turn(one, f"messages.{at}")):
        before = turns[-1] if turns else {}
        both = before.get("role"), said["role"]
        if both in (("user", "user"), ("assistant", "assistant")) and "tool_calls" not in before:
            texts = filter(None, (turns.pop()["content"], said["content"]))
            said["content"] = "\n".join(texts)
        turns.append(said)
    return turns


def _turn(value: Any, path: str) -> list[dict[str, Any]]:
    match value:
        case {"role": "user" | "assistant" | "system" as role, "content": content}:
            pass
        case _:
            expected = 'an object {"role": "user" or "assistant", "content": …}'
            raise unfit(path, value, expected)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise unfit(f"{path}.content", content, "text or a list of blocks")
    texts, calls, results = list[str](), list[dict[str, Any]](), list[dict[str, Any]]()
    for at, block in enumerate(content):
        where = f"{path}.content.{at}"
        match role, block:
            case _, {"type": "text"}:
                texts.append(validated(TEXT, block, where).text)
            case "assistant", {"type": "thinking" | "redacted_thinking"}:
                pass  # it comes back from earlier answers
            case "assistant", {"type": "tool_use"}:
                used = validated(USE, block, where)
                function = {"name": used.name, "arguments": used.input}
                calls.append({"id": used.id, "type": "function", "function": function})
            case "user", {"type": "tool_result"}:
                found = validated(RESULT, block, where)
                text = read_text(found.content, f"{where}.content", TEXT, "blocks")
                results.append({"role": "tool", "content": text, "tool_call_id": found.tool_use_id})
            case _, {"type": str(kind)}:
                raise unsupported(kind, f"{where}.type")
            case _:
                raise unfit(where, block, 'a block {"type": …}')
    said = {"role": role, "content": "\n".join(texts)}
    if calls:
        return [{**said, "tool_calls": calls}]
    return [*results, *([said] if texts or not results else [])]


def read_functions(value: Any) -> list[dict[str, Any]]:
    """The tools, as chats have them. Those that Anthropic's own servers run have other types."""
    if not isinstance(value, list):
        raise unfit("tools", value, "a list of tools")
    found = list[dict[str, Any]]()
    for at, one in enumerate(value):
        match one:
            case {"type": str(kind)} if kind != "custom":
                raise unsupported(kind, f"tools.{at}.type")
        tool = validated(TOOL, one, f"tools.{at}")
        said = {} if tool.description is None else {"description": tool.description}
        function = {"name": tool.name, **said, "parameters": tool.input_schema}
        found.append({"type": "function", "function": function})
    return read_tools(found)


def read_choice(value: Any) -> str | tuple[str]:
    """Which calls are asked for, as `Tooled.tool_choice`."""
    choice = validated(CHOSEN, value, "tool_choice")
    match choice:
        case ToolChoice(type="tool", name=str(name)):
            return (name,)
        case ToolChoice(type="auto" | "none", name=None):
            return str(choice.type)
        case ToolChoice(type="any", name=None):
            return "required"
    raise unfit("tool_choice", value, 'a name beside "type": "tool", and only there')


def read_output(value: Any) -> AskedGrammar | None:
    """The format of `output_config`. None: any text. The effort of reasoning is the model's own."""
    if isinstance(value, dict) and value.keys() <= {"effort", "format"}:
        match value.get("format"):
            case None:
                return None
            case {"type": "json_schema", "schema": dict(schema)}:
                return AskedGrammar("output_config", "json_schema", schema)
    expected = 'an object with "effort" or {"format": {"type": "json_schema", "schema": {…}}}'
    raise unfit("output_config", value, expected)


class MessagesRequest(Tooled):
    """The body of /v1/messages."""

    asks = "messages"
    formats = ("structured_outputs", "output_config")

    messages: Annotated[
        list[dict[str, Any]],
        PlainValidator(read_turns),
        WithJsonSchema({"title": "a list of messages"}),
    ] = Field(
        description="what is answered; thoughts of earlier answers are left out, and an answer "
        "goes on from a last text of the assistant"
    )
    max_tokens: int = Field(ge=1, description="the longest text, in tokens")
    system: Annotated[
        str | None,
        PlainValidator(lambda value: read_text(value, "system", TEXT, "blocks")),
        WithJsonSchema({"title": "text or a list of blocks of text"}),
    ] = Field(None, description="a system message before the others")
    stop_sequences: Annotated[
        tuple[str, ...], PlainValidator(lambda value: read_stops(value, "stop_sequences")), TEXTS
    ] = Field((), description="the text ends before the first of them")
    tools: Annotated[list[dict[str, Any]], PlainValidator(read_functions), FUNCTIONS] = Field(
        [], description="functions that the answer may call"
    )
    tool_choice: Annotated[
        str | tuple[str],
        PlainValidator(read_choice),
        WithJsonSchema({"title": "an object with a type: auto, any, none, or tool with its name"}),
    ] = Field("auto", description="a forced call has the schema of its function's `input_schema`")

    output_config: Annotated[
        AskedGrammar | None,
        PlainValidator(read_output),
        WithJsonSchema({"title": "an object with a format"}),
    ] = Field(None, description="the text is JSON of the schema of `format`")

    @model_validator(mode="before")
    @classmethod
    def _at_most_one(cls, values: dict[str, Any]) -> dict[str, Any]:
        match values.get("tool_choice"):
            case {"disable_parallel_tool_use": True}:
                return values | {"parallel_tool_calls": False}
        return values

    @property
    def stops(self) -> tuple[str, ...]:
        return self.stop_sequences

    @property
    def likeliest(self) -> None:
        return None

    @property
    def template(self) -> dict[str, Any]:
        last = self.messages[-1]
        goes_on = last["role"] == "assistant" and last["content"] and "tool_calls" not in last
        added = {"continue_final_message": True, "add_generation_prompt": False} if goes_on else {}
        return super().template | added

    def prompts(self) -> Sequence[Prompt]:
        said = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [[*said, *self.messages]]


class CountRequest(MessagesRequest):
    """The body of /v1/messages/count_tokens."""

    max_tokens: int = Field(1, ge=1, description="changes nothing")


_IGNORED = ignored_by(MessagesRequest) | {
    "thinking": "reasoning is a part of the text and is not taken out of it",
    "context_management": "the whole conversation is read",
    **_CACHE,
    **dict.fromkeys(("user_profile_id", "workspace_id"), "labels the request for its sender"),
}
_ONE_CLASS = {"service_tier": ("auto", "standard_only"), "speed": ("standard",)}
_REFUSED = {"there is one class of requests": _ONE_CLASS} | REFUSED
MESSAGES = KnownFields(MessagesRequest, _IGNORED, _REFUSED)
COUNT = KnownFields(CountRequest, _IGNORED, _REFUSED)
