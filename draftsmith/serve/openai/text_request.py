"""What requests of all routes ask for: drawing, streams, options of ours, grammars and tools."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from decode.draw.sampling import Sampling
from decode.text import Prompt
from draftsmith.net.api_error import ApiError
from draftsmith.serve.openai.formats import (
    METHODS,
    AskedGrammar,
    read_response_format,
    read_structured_outputs,
)
from draftsmith.serve.openai.known_fields import KnownFields, RequestPart, shown, validated
from draftsmith.serve.openai.messages import (
    LONGEST_STOP,
    MOST_STOPS,
    read_stops,
)
from draftsmith.serve.openai.tools import (
    read_tool_choice,
    read_tools,
)

LONGEST_LABEL = 64  # characters
MOST_ENTRIES = 64  # of a mapping or list of options


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


STREAM_OPTIONS = KnownFields(
    StreamOptions, {"include_obfuscation": "the sizes of chunks are not hidden"}
)
OUR_OPTIONS = KnownFields(OurOptions)
REASONING = KnownFields(
    Reasoning, dict.fromkeys(("summary", "generate_summary"), "reasoning is not summarised")
)


def an_object(known: KnownFields, path: str) -> Any:
    """A validator of a field that is an object with fields of its own."""
    return PlainValidator(lambda value: validated(known, value, path))


def _few(value: Any) -> Any:
    if isinstance(value, dict | list) and len(value) > MOST_ENTRIES:
        raise ValueError(f"there are {len(value)} entries; expected at most {MOST_ENTRIES}")
    return value


FEW = BeforeValidator(_few)
TEXT_OR_IDS = WithJsonSchema({"title": "text or token ids, one prompt or several"})
TEXTS = WithJsonSchema({"title": f"up to {MOST_STOPS} texts of at most {LONGEST_STOP} characters"})
OBJECT = WithJsonSchema({"title": "an object"})
FUNCTIONS = WithJsonSchema({"title": "a list of functions"})
CHOICE = WithJsonSchema({"title": "auto, none, required, or a function by its name"})


class TextRequest(RequestPart):
    """What all kinds of requests have: how text is drawn, as in `Sampling` (None: as the service is
    set), and more."""

    # The field with what is answered, and the names of those that limit the length of a text, the
    # first one that is given.
    asks: ClassVar[str]
    limits: ClassVar[tuple[str, ...]] = ("max_tokens",)
    default_limit: ClassVar[int | None] = None
    # `store` asks for something that only a service that learns does.
    keeps_store: ClassVar[bool] = True
    # What has the format that a request forces, if it does, beside `guided_*`.
    formats: ClassVar[tuple[str, ...]] = ("structured_outputs",)

    repetition_penalty: float | None = Field(None, description="1: none")
    presence_penalty: float | None = Field(
        None, description="from −2 to 2, for tokens that were generated"
    )
    frequency_penalty: float | None = Field(
        None, description="from −2 to 2, for each time that a token was generated"
    )
    logit_bias: dict[str, float] | None = Field(
        None, description="what is added to the logits of token ids, from −100 to 100"
    )
    min_tokens: int | None = Field(
        None, description="no end token before this number of tokens exists"
    )
    stop_token_ids: list[int] | None = Field(None, description="token ids that end the text")
    temperature: float | None = Field(None, description="0: greedy")
    top_k: int | None = Field(
        None, description="how many of the likeliest tokens stay; 0 and -1: all"
    )
    top_p: float | None = Field(None, description="the likeliest tokens with this probability")
    min_p: float | None = Field(
        None, description="tokens at least so likely, relative to the likeliest"
    )
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
        AskedGrammar | None, PlainValidator(read_structured_outputs), OBJECT
    ] = Field(None, description="one of `json`, `regex`, `choice`, `grammar`, `json_object`")
    store: bool = Field(False, description="the service may learn from this request")
    stream: bool = Field(False, description="answer in server-sent events")
    stream_options: Annotated[
        StreamOptions | None, an_object(STREAM_OPTIONS, "stream_options"), OBJECT
    ] = Field(None, description="only with `stream`")
    draftsmith: Annotated[OurOptions, an_object(OUR_OPTIONS, "draftsmith"), OBJECT] = Field(
        OurOptions(), description="what this service alone can do"
    )

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> "TextRequest":
        if self.stream_options is not None and not self.stream:
            message = "stream_options is given without stream: true; leave it out"
            raise ApiError(400, message, param="stream_options", code="invalid_value")
        return self

    @model_validator(mode="after")
    def _one_grammar(self) -> "TextRequest":
        asked = self._grammars
        if len(asked) > 1:
            message = f"{' and '.join(x.field for x in asked)} are given; choose one format"
            raise ApiError(400, message, param=asked[1].field, code="invalid_value")
        if asked and self.ignore_eos:
            message = "ignore_eos is true beside a forced format, which ends its text; leave it out"
            raise ApiError(400, message, param="ignore_eos", code="invalid_value")
        if asked and self.min_tokens:
            said = f"min_tokens is {self.min_tokens} beside a forced format, which ends its text"
            raise ApiError(400, f"{said}; leave it out", param="min_tokens", code="invalid_value")
        return self

    @cached_property
    def _grammars(self) -> list[AskedGrammar]:
        guided = ((f"guided_{name}", method) for name, method in METHODS.items())
        asked = [AskedGrammar(field, x, getattr(self, field)) for field, x in guided]
        formats = (getattr(self, name) for name in self.formats)
        return [x for x in asked if x.given is not None] + [x for x in formats if x is not None]

    @property
    def grammar(self) -> AskedGrammar | None:
        """The grammar of the texts. None: any text."""
        return next(iter(self._grammars), None)

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
        """How text is drawn. default: for what the request does not say. Raises UserError."""
        said = {x.name: getattr(self, x.name) for x in fields(default) if x.name != "grammar"}
        return replace(default, **{name: x for name, x in said.items() if x is not None})


class Several(TextRequest):
    """Requests that may ask for several texts of one prompt."""

    formats = ("structured_outputs", "response_format")

    max_tokens: int | None = Field(None, ge=1, description="the longest text, in tokens")
    n: int = Field(1, ge=1, description="how many texts each prompt gets")
    stop: Annotated[tuple[str, ...], PlainValidator(read_stops), TEXTS] = Field(
        (), description="the text ends before the first of them"
    )
    return_token_ids: bool = Field(
        False, description="give the ids of the tokens, and of the prompt's"
    )

    response_format: Annotated[
        AskedGrammar | None, PlainValidator(read_response_format), OBJECT
    ] = Field(None, description="`json_object`, or `json_schema` with a schema")

    @property
    def texts(self) -> int:
        return self.n

    @property
    def stops(self) -> tuple[str, ...]:
        return self.stop


class Tooled(TextRequest):
    """Requests whose answers may call functions."""

    tools: Annotated[list[dict[str, Any]], PlainValidator(read_tools), FUNCTIONS] = Field(
        [], description="functions that the answer may call"
    )
    tool_choice: Annotated[str | tuple[str], PlainValidator(read_tool_choice), CHOICE] = Field(
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
        if self.grammar or self.ignore_eos or self.min_tokens:
            return (
                "tool_choice forces a call, which is a format of its own and ends the text; leave "
                "other formats, ignore_eos and min_tokens out"
            )
        return None

    @property
    def said(self) -> list[dict[str, Any]]:
        """The messages."""
        return getattr(self, self.asks)

    @property
    def called(self) -> Sequence[dict[str, Any]]:
        """The functions that an answer may call."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def template(self) -> dict[str, Any]:
        return {"tools": list(self.called)} if self.called else {}
