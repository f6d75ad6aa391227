"""Requests in the shape of OpenAI's API: what is read, what is refused, and how errors look."""

import json
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from decode.errors import UserError, nearest
from decode.policies import POLICIES
from decode.rules import RULES
from decode.sampling import Sampling

LONGEST_STOP = 256  # characters
LONGEST_LABEL = 64  # characters


class ApiError(Exception):
    """An answer with an error status. retry_after: seconds; None: the same request would fail
    again."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @property
    def headers(self) -> dict[str, str]:
        # OpenAI's client tries an error ≥ 500 again unless it is told not to.
        if self.retry_after is None:
            return {"x-should-retry": "false"}
        return {"retry-after": str(self.retry_after)}


# Fields that are taken only with these values, as JSON: those that ask for nothing.
NEUTRAL = {
    "best_of": ("1",),
    "echo": ("false",),
    "frequency_penalty": ("0", "0.0"),
    "functions": ("[]",),
    "logit_bias": ("{}",),
    "logprobs": ("false",),
    "modalities": ('["text"]',),
    "presence_penalty": ("0", "0.0"),
    "response_format": ('{"type": "text"}',),
    "service_tier": ('"auto"', '"default"'),
    "suffix": ('""',),
    "tool_choice": ('"none"', '"auto"'),
    "tools": ("[]",),
    "top_logprobs": ("0",),
}
# Fields that label a request for its sender. They change no answer.
LABELS = ("metadata", "prompt_cache_key", "safety_identifier", "user")


class _Part(BaseModel):
    """A part of a request. Other fields and types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Part):
    include_usage: bool = False


class OurOptions(_Part):
    """What this service alone can do. trace: say which tokens of a text are draft tokens. label:
    the kind of the text, for drafters that are chosen by it."""

    trace: bool = False
    label: str | None = Field(None, max_length=LONGEST_LABEL)


_StopString = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


class _Asked(_Part):
    """What both kinds of requests have. None: as the service is set."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int = Field(1, ge=1)
    stop: _StopString | Annotated[list[_StopString], Field(max_length=4)] | None = None
    ignore_eos: bool = False
    store: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    draftsmith: OurOptions = OurOptions()

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def limit(self) -> tuple[str, int | None]:
        """The name of the field that limits the length of a text, and its value."""
        return "max_tokens", self.max_tokens

    @property
    @abstractmethod
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens to give with each token's log-probability. None: give no
        log-probabilities."""

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, default: Sampling) -> Sampling:
        """How text is drawn. default: for what the request does not say."""
        said = {name: getattr(self, name) for name in vars(default)}
        return replace(default, **{name: x for name, x in said.items() if x is not None})


class TextPart(_Part):
    type: Literal["text"]
    text: str


class Message(_Part):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def for_template(self) -> dict[str, str]:
        """Chat templates know no developer: it is the newer name of the system."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        return {"role": role, "content": "\n".join(part.text for part in self.content)}


class ChatRequest(_Asked):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @field_validator("top_logprobs")
    @classmethod
    def _with_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("it needs logprobs: true beside it")
        return value

    @property
    def likeliest(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().limit


class CompletionRequest(_Asked):
    """The body of /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=5)

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """One or several prompts, as text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]


class SettingsChange(_Part):
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


Asked = TypeVar("Asked", bound=_Part)


def parse(kind: type[Asked], body: bytes) -> Asked:
    """Read a request. Raises ApiError for anything but a JSON object with fields that this service
    knows."""
    try:
        values = json.loads(body, parse_constant=_refuse_constant)
        json.dumps(values, ensure_ascii=False).encode()  # half a character, written as an escape
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ApiError(400, f"the body is {_kind(values)}; expected a JSON object")
    values = {key: x for key, x in values.items() if not _says_nothing(key, x)}
    if isinstance(values.get("messages"), list):
        values["messages"] = [_without_nothing(message) for message in values["messages"]]
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _as_api_error(error, kind, values) from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number in JSON")


def _says_nothing(key: str, value: Any) -> bool:
    return value is None or key in LABELS or json.dumps(value) in NEUTRAL.get(key, ())


def _without_nothing(message: Any) -> Any:
    """A message without the empty fields that OpenAI's client sends back in earlier answers."""
    if not isinstance(message, dict):
        return message
    return {key: value for key, value in message.items() if value is not None and value != []}


def _as_api_error(error: ValidationError, kind: type[_Part], values: Any) -> ApiError:
    """The first fault, by the name of its field."""
    first = error.errors(include_url=False, include_input=False)[0]
    path: list[str] = []
    for key in first["loc"]:
        # The names of a union's alternatives are in the path too.
        if isinstance(values, Mapping) and key not in values and first["type"] != "missing":
            break
        if not isinstance(values, Mapping | list):
            break
        if isinstance(values, list) and not isinstance(key, int):
            break
        path.append(str(key))
        values = values.get(key) if isinstance(values, Mapping) else values[key]  # type: ignore[index]
    param = ".".join(path)
    if first["type"] == "extra_forbidden":
        hint = nearest(path[-1], kind.model_fields) if len(path) == 1 else ""
        message = f"{param} is not supported with this value by this service; leave it out.{hint}"
        return ApiError(400, message, param=param, code="unsupported_parameter")
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return ApiError(
        400, f"{param}: {first['msg'].removeprefix('Value error, ')}", param=param, code=code
    )


def _kind(value: Any) -> str:
    names = {list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def refused(error: UserError, param: str | None = None) -> ApiError:
    """A request that the decode refuses."""
    return ApiError(400, str(error), param=param)
