"""Requests in the shape of OpenAI's API: the fields that are served."""

import inspect
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_type_hints

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    create_model,
    field_validator,
    model_validator,
)
from transformers import PreTrainedTokenizerBase

from decode.base.errors import UserError
from decode.draw.sampling import Sampling
from decode.lengths import POLICIES
from decode.rules import RULES
from decode.text import Prompt
from draftsmith.serve.openai.api_errors import ApiError, shown
from draftsmith.serve.openai.contract import Contract, RequestPart, validated
from draftsmith.serve.openai.fields import IGNORED, REFUSED
from draftsmith.serve.openai.formats import (
    ANY_TEXT,
    METHODS,
    AskedGrammar,
    TextFormat,
    read_response_format,
    read_structured_outputs,
    read_text_format,
)
from draftsmith.serve.openai.messages import (
    LONGEST_STOP,
    MOST_STOPS,
    read_items,
    read_messages,
    read_prompts,
    read_stops,
)
from draftsmith.serve.openai.tools import (
    read_flat_choice,
    read_flat_tools,
    read_tool_choice,
    read_tools,
)

LONGEST_LABEL = 64  # characters
MOST_ENTRIES = 64  # of a mapping or list of options
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


class StreamOptions(RequestPart):
    include_usage: bool = Field(False, description="an extra last chunk has the usage")
    continuous_usage_stats: bool = Field(False, description="each chunk has the usage so far")


class OurOptions(RequestPart):
    """What this service alone can do."""

    trace: bool = Field(False, description="say which tokens of a text are draft tokens")
    label: str | None = Field(
        None,
        max_length=LONGEST_LABEL,
        description="the kind of the text, for drafters that are chosen by it",
    )


class Reasoning(RequestPart):
    effort: str | None = Field(None, description="a variable of the chat template")


STREAM_OPTIONS = Contract(
    StreamOptions, {"include_obfuscation": "the sizes of chunks are not hidden"}
)
OUR_OPTIONS = Contract(OurOptions)
REASONING = Contract(
    Reasoning, dict.fromkeys(("summary", "generate_summary"), "reasoning is not summarised")
)


def _object(contract: Contract, path: str) -> Any:
    """A validator of a field that is an object with a contract of its own."""
    return PlainValidator(lambda value: validated(contract, value, path))


def _few(value: Any) -> Any:
    if isinstance(value, dict | list) and len(value) > MOST_ENTRIES:
        raise ValueError(f"there are {len(value)} entries; expected at most {MOST_ENTRIES}")
    return value


FEW = BeforeValidator(_few)
_TEXT_OR_IDS = WithJsonSchema({"title": "text or token ids, one prompt or several"})
_TEXTS = WithJsonSchema({"title": f"up to {MOST_STOPS} texts of at most {LONGEST_STOP} characters"})
_OBJECT = WithJsonSchema({"title": "an object"})
_FUNCTIONS = WithJsonSchema({"title": "a list of functions"})
_CHOICE = WithJsonSchema({"title": "auto, none, required, or a function by its name"})


_DRAWN = {x.name: x.metadata for x in fields(Sampling) if x.metadata}


def _drawn(name: str) -> Any:
    """The field of a request for a field of `Sampling`."""
    kind = _DRAWN[name]["json"] or get_type_hints(Sampling)[name]
    return kind | None, Field(None, description=_DRAWN[name]["said"])


if TYPE_CHECKING:

    class Drawn(RequestPart):
        temperature: float | None
        top_p: float | None

else:
    Drawn = create_model("Drawn", __base__=RequestPart, **{x: _drawn(x) for x in _DRAWN})


class Asked(Drawn):
    """What all kinds of requests have: how text is drawn, which `Sampling` declares, and more.
    None: as the service is set."""

    # The field with what is answered, and the names of those that limit the length of a text, the
    # first one that is given.
    asks: ClassVar[str]
    limits: ClassVar[tuple[str, ...]] = ("max_tokens",)
    default_limit: ClassVar[int | None] = None
    # `store` asks for something that only a service that learns does.
    keeps_store: ClassVar[bool] = True

    model: str = Field(description="the name of the model, see /v1/models")
    seed: int | None = Field(
        None,
        description="with one `system_fingerprint` and in float32, the text is the same",
    )
    ignore_eos: bool = Field(False, description="the text goes on to its limit")
    guided_json: Annotated[Any, WithJsonSchema({"title": "an object or its text"})] = Field(
        None, description="the text is JSON of this schema"
    )
    guided_regex: str | None = Field(None, description="the text matches this expression")
    guided_choice: Annotated[list[str] | None, FEW] = Field(
        None, description="the text is one of these"
    )
    guided_grammar: str | None = Field(None, description="the text is one of this Lark grammar")
    structured_outputs: Annotated[
        AskedGrammar | None, PlainValidator(read_structured_outputs), _OBJECT
    ] = Field(None, description="one of `json`, `regex`, `choice`, `grammar`, `json_object`")
    store: bool = Field(False, description="the service may learn from this request")
    stream: bool = Field(False, description="answer in server-sent events")
    stream_options: Annotated[
        StreamOptions | None, _object(STREAM_OPTIONS, "stream_options"), _OBJECT
    ] = Field(None, description="only with `stream`")
    draftsmith: Annotated[OurOptions, _object(OUR_OPTIONS, "draftsmith"), _OBJECT] = Field(
        OurOptions(), description="what this service alone can do"
    )

    @field_validator("top_k", mode="before")
    @classmethod
    def _all_tokens(cls, value: Any) -> Any:
        return 0 if value == -1 else value

    @field_validator(*_DRAWN)
    @classmethod
    def _can_be_drawn(cls, value: Any, info: ValidationInfo) -> Any:
        name = str(info.field_name)
        try:
            return getattr(Sampling(**{name: value}), name)
        except UserError as error:
            raise ValueError(str(error)) from None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> "Asked":
        if self.stream_options is not None and not self.stream:
            message = "stream_options is given without stream: true; leave it out"
            raise ApiError(400, message, param="stream_options", code="invalid_value")
        return self

    @model_validator(mode="after")
    def _one_grammar(self) -> "Asked":
        asked = self._grammars()
        if len(asked) > 1:
            message = f"{' and '.join(x.field for x in asked)} are given; choose one format"
            raise ApiError(400, message, param=asked[1].field, code="invalid_value")
        if asked and self.ignore_eos:
            message = "ignore_eos is true beside a forced format, which ends its text; leave it out"
            raise ApiError(400, message, param="ignore_eos", code="invalid_value")
        if asked and (least := self.sampling(Sampling()).min_tokens):
            message = f"min_tokens is {least} beside a forced format, which ends its text; leave it"
            raise ApiError(400, f"{message} out", param="min_tokens", code="invalid_value")
        return self

    def _grammars(self) -> list[AskedGrammar]:
        guided = ((f"guided_{name}", method) for name, method in METHODS.items())
        asked = [AskedGrammar(field, x, getattr(self, field)) for field, x in guided]
        said = [x for x in asked if x.given is not None]
        return said if self.structured_outputs is None else [*said, self.structured_outputs]

    @property
    def grammar(self) -> AskedGrammar | None:
        """The grammar of the texts. None: any text."""
        return next(iter(self._grammars()), None)

    @abstractmethod
    def prompts(self) -> Sequence[Prompt]:
        """What is to be answered or continued, at least one."""

    @property
    @abstractmethod
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens to give with each token's log-probability. None: give no
        log-probabilities."""

    @property
    def texts(self) -> int:
        """How many texts each prompt gets."""
        return 1

    @property
    def kept(self) -> int:
        """How many of these texts are given, the likeliest by the mean over their tokens."""
        return self.texts

    @property
    def echoed(self) -> Sequence[str | list[int]]:
        """The prompts, if the texts begin with them."""
        return []

    @property
    def gives_token_ids(self) -> bool:
        """Whether the answer has the ids of its tokens and of its prompts."""
        return False

    @property
    def stops(self) -> tuple[str, ...]:
        return ()

    @property
    def template(self) -> dict[str, Any]:
        """Options of the chat template."""
        return {}

    @property
    def limit(self) -> tuple[str, int | None]:
        """The name of the field that limits the length of a text, and its value."""
        said = ((name, getattr(self, name)) for name in self.limits)
        given = ((name, limit) for name, limit in said if limit is not None)
        return next(given, (self.limits[0], self.default_limit))

    def sampling(self, default: Sampling) -> Sampling:
        """How text is drawn. default: for what the request does not say."""
        said = {name: getattr(self, name) for name in _DRAWN}
        return replace(default, **{name: x for name, x in said.items() if x is not None})


class _Several(Asked):
    """Requests that may ask for several texts of one prompt."""

    max_tokens: int | None = Field(None, ge=1, description="the longest text, in tokens")
    n: int = Field(1, ge=1, description="how many texts each prompt gets")
    stop: Annotated[tuple[str, ...], PlainValidator(read_stops), _TEXTS] = Field(
        (), description="the text ends before the first of them"
    )
    return_token_ids: bool = Field(
        False, description="give the ids of the tokens, and of the prompt's"
    )

    response_format: Annotated[
        AskedGrammar | None, PlainValidator(read_response_format), _OBJECT
    ] = Field(None, description="`json_object`, or `json_schema` with a schema")

    def _grammars(self) -> list[AskedGrammar]:
        format_ = self.response_format
        return [*super()._grammars(), *(() if format_ is None else (format_,))]

    @property
    def texts(self) -> int:
        return self.n

    @property
    def gives_token_ids(self) -> bool:
        return self.return_token_ids

    @property
    def stops(self) -> tuple[str, ...]:
        return self.stop


class Tooled(Asked):
    """Requests whose answers may call functions."""

    tools: Annotated[list[dict[str, Any]], PlainValidator(read_tools), _FUNCTIONS] = Field(
        [], description="functions that the answer may call"
    )
    tool_choice: Annotated[str | tuple[str], PlainValidator(read_tool_choice), _CHOICE] = Field(
        "auto", description="a forced call has the schema of its function's `parameters`"
    )
    parallel_tool_calls: bool = Field(True, description="false: at most one call")

    @model_validator(mode="after")
    def _can_choose(self) -> "Tooled":
        if (wrong := self._wrong_choice()) is not None:
            raise ApiError(400, wrong, param="tool_choice", code="invalid_value")
        return self

    def _wrong_choice(self) -> str | None:
        """Why no call can be forced. None: it can, or is not asked for."""
        choice = self.tool_choice
        if choice in ("auto", "none"):
            return None
        names = [tool["function"]["name"] for tool in self.tools]
        if not names or (isinstance(choice, tuple) and choice[0] not in names):
            said = choice[0] if isinstance(choice, tuple) else choice
            return f"tool_choice asks for {shown(said)}, but tools has {', '.join(names) or 'none'}"
        if self.grammar or self.ignore_eos or self.sampling(Sampling()).min_tokens:
            return (
                "tool_choice forces a call, which is a format of its own and ends the text; leave "
                "other formats, ignore_eos and min_tokens out"
            )
        return None

    @property
    @abstractmethod
    def said(self) -> list[dict[str, Any]]:
        """The messages."""

    @property
    def called(self) -> Sequence[dict[str, Any]]:
        """The functions that an answer may call."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def template(self) -> dict[str, Any]:
        return {"tools": list(self.called)} if self.called else {}


class ChatRequest(_Several, Tooled):
    """The body of /v1/chat/completions."""

    asks = "messages"
    limits = ("max_completion_tokens", "max_tokens")

    messages: Annotated[
        list[dict[str, Any]],
        PlainValidator(read_messages),
        WithJsonSchema({"title": "a list of messages"}),
    ] = Field(description="what is answered")
    max_completion_tokens: int | None = Field(
        None, ge=1, description="has precedence over `max_tokens`"
    )
    logprobs: bool = Field(False, description="give the log-probability of each token")
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description="how many likeliest tokens stand beside each; needs `logprobs`",
    )
    continue_final_message: bool = Field(
        False, description="the last message is the beginning of the answer"
    )
    add_generation_prompt: bool | None = Field(
        None, description="false: no beginning of an answer follows the last message"
    )
    reasoning_effort: str | None = Field(None, description="a variable of the chat template")
    chat_template_kwargs: Annotated[dict[str, str | bool | int | float], FEW] = Field(
        {}, description="variables of the chat template"
    )

    @model_validator(mode="after")
    def _fits(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            message = "top_logprobs needs logprobs: true beside it"
            raise ApiError(400, message, param="top_logprobs", code="invalid_value")
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt are both true; choose one"
            raise ApiError(400, message, param="continue_final_message", code="invalid_value")
        if self.continue_final_message and self.messages[-1]["role"] != "assistant":
            message = "continue_final_message is true, but the last message is not the assistant's"
            raise ApiError(400, message, param="continue_final_message", code="invalid_value")
        if taken := OPTIONS_OF_TEMPLATES.intersection(self.chat_template_kwargs):
            message = f"chat_template_kwargs has {min(taken)}, which is no variable; leave it out"
            raise ApiError(400, message, param="chat_template_kwargs", code="invalid_value")
        return self

    @property
    def said(self) -> list[dict[str, Any]]:
        return self.messages

    def prompts(self) -> Sequence[Prompt]:
        return [self.messages]

    @property
    def likeliest(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def template(self) -> dict[str, Any]:
        effort = self.reasoning_effort
        options: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        options |= self.chat_template_kwargs | super().template
        if self.continue_final_message or self.add_generation_prompt is False:
            options["add_generation_prompt"] = False
        if self.continue_final_message:
            options["continue_final_message"] = True
        return options


# What `apply_chat_template` takes besides variables.
OPTIONS_OF_TEMPLATES = {
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    "conversations",
    "messages",
}


class CompletionRequest(_Several):
    """The body of /v1/completions."""

    asks = "prompt"
    default_limit = COMPLETION_TOKENS

    prompt: Annotated[list[str | list[int]], PlainValidator(read_prompts), _TEXT_OR_IDS] = Field(
        description="what is continued"
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=5,
        description="how many likeliest tokens stand beside each, with their values",
    )
    add_special_tokens: bool = Field(
        True, description="as the tokenizer does, for example a token for the beginning"
    )
    echo: bool = Field(False, description="the text begins with its prompt; without `logprobs`")
    best_of: int | None = Field(
        None,
        ge=1,
        description="draw this number of texts, and give the `n` whose tokens are likeliest in the "
        "mean; no stream",
    )

    @field_validator("logprobs", mode="before")
    @classmethod
    def _no_logprobs(cls, value: Any) -> Any:
        return None if value is False else value

    @model_validator(mode="after")
    def _fits(self) -> "CompletionRequest":
        wrong = None
        if self.echo and self.logprobs is not None:
            message = "echo is true beside logprobs, which the tokens of a prompt do not have"
            wrong = ("echo", f"{message}; leave one out")
        elif self.texts < self.n:
            wrong = ("best_of", f"best_of is {self.best_of}; expected at least n, {self.n}")
        elif self.texts > self.n and self.stream:
            message = "best_of is above n beside stream: true, but the best texts are known last"
            wrong = ("best_of", f"{message}; leave one out")
        if wrong is not None:
            raise ApiError(400, wrong[1], param=wrong[0], code="invalid_value")
        return self

    def prompts(self) -> Sequence[Prompt]:
        return self.prompt

    @property
    def texts(self) -> int:
        return self.n if self.best_of is None else self.best_of

    @property
    def kept(self) -> int:
        return self.n

    @property
    def echoed(self) -> Sequence[str | list[int]]:
        return self.prompt if self.echo else []

    @property
    def template(self) -> dict[str, Any]:
        return {} if self.add_special_tokens else {"add_special_tokens": False}

    @property
    def likeliest(self) -> int | None:
        return self.logprobs


Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


class ResponsesRequest(Tooled):
    """The body of /v1/responses."""

    asks = "input"
    limits = ("max_output_tokens",)
    keeps_store = False  # OpenAI's default is true

    input: Annotated[
        list[dict[str, Any]],
        PlainValidator(read_items),
        WithJsonSchema({"title": "text or a list of messages and calls"}),
    ] = Field(description="what is answered")
    tools: Annotated[list[dict[str, Any]], PlainValidator(read_flat_tools), _FUNCTIONS] = Field(
        [], description="functions that the answer may call"
    )
    tool_choice: Annotated[str | tuple[str], PlainValidator(read_flat_choice), _CHOICE] = Field(
        "auto", description="a forced call has the schema of its function's `parameters`"
    )
    instructions: str | None = Field(None, description="a system message before the others")
    max_output_tokens: int | None = Field(None, ge=1, description="the longest text, in tokens")
    include: Annotated[list[Included], FEW] = Field(
        [], description="log-probabilities; there is no reasoning to encrypt"
    )
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="how many likeliest tokens stand beside each"
    )
    metadata: Annotated[dict[str, str], FEW] = Field({}, description="repeated in the answer")
    text: Annotated[TextFormat, PlainValidator(read_text_format), _OBJECT] = Field(
        ANY_TEXT, description="`format`: `json_object`, or `json_schema` with a schema"
    )
    reasoning: Annotated[Reasoning, _object(REASONING, "reasoning"), _OBJECT] = Field(
        Reasoning(), description="the effort is a variable of the chat template"
    )

    def _grammars(self) -> list[AskedGrammar]:
        form = self.text.grammar
        return [*super()._grammars(), *(() if form is None else (form,))]

    @property
    def said(self) -> list[dict[str, Any]]:
        return self.input

    def prompts(self) -> Sequence[Prompt]:
        said = [] if self.instructions is None else [self.instructions]
        return [[*({"role": "system", "content": x} for x in said), *self.input]]

    @property
    def likeliest(self) -> int | None:
        asks = self.top_logprobs or "message.output_text.logprobs" in self.include
        return self.top_logprobs or 0 if asks else None

    @property
    def template(self) -> dict[str, Any]:
        effort = self.reasoning.effort
        said = {} if effort is None else {"reasoning_effort": effort}
        return said | super().template


class SettingsChange(RequestPart):
    """The body of POST /admin/settings. None: it stays."""

    gamma: int | None = Field(None, ge=1)
    policy: str | None = Field(None, examples=sorted(POLICIES))
    rule: str | None = Field(None, examples=sorted(RULES))
    lenience: float | None = Field(None, gt=0, le=1)
    dynamic_lenience: float | None = Field(None, gt=0, le=1)
    drafter: str | None = Field(None, min_length=1)
    learning: bool | None = None

    @classmethod
    def fields(cls) -> dict[str, dict[str, Any]]:
        """The JSON schema of each field, without null."""
        fields = {}
        for name, schema in cls.model_json_schema()["properties"].items():
            kind = next(x for x in schema.get("anyOf", [schema]) if x.get("type") != "null")
            known = {key: schema[key] for key in ("examples",) if key in schema}
            fields[name] = {**kind, **known}
        return fields


CHAT = Contract(
    ChatRequest,
    {name: why for name, why in IGNORED.items() if name not in ChatRequest.model_fields},
    REFUSED,
)
COMPLETION = Contract(CompletionRequest, IGNORED, REFUSED)
RESPONSES = Contract(
    ResponsesRequest,
    {name: why for name, why in IGNORED.items() if name not in ResponsesRequest.model_fields},
    REFUSED
    | {
        "one text is given, to its end": {"n": (1,), "stop": ([], "")},
        "templates of prompts are not kept": {"prompt": ()},
        "use text.format": {"response_format": ({"type": "text"}, {})},
        "token ids are given by /v1/completions and chat only": {"return_token_ids": (False,)},
    },
)
SETTINGS = Contract(SettingsChange)
