"""Requests in the shape of OpenAI's API: the fields that each route serves."""

import inspect
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PlainValidator,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from transformers import PreTrainedTokenizerBase

from decode.lengths import POLICIES
from decode.rules import RULES
from decode.text import Prompt
from draftsmith.net.api_error import ApiError
from draftsmith.serve.openai.fields import IGNORED, REFUSED, ignored_by
from draftsmith.serve.openai.formats import (
    ANY_TEXT,
    AskedGrammar,
    TextFormat,
    read_text_format,
)
from draftsmith.serve.openai.known_fields import KnownFields, RequestPart
from draftsmith.serve.openai.messages import (
    read_items,
    read_messages,
    read_prompts,
)
from draftsmith.serve.openai.text_request import (
    CHOICE,
    FEW,
    FUNCTIONS,
    LONGEST_LABEL,
    OBJECT,
    REASONING,
    TEXT_OR_IDS,
    Reasoning,
    Several,
    Tooled,
    an_object,
)
from draftsmith.serve.openai.tools import (
    read_flat_choice,
    read_flat_tools,
)

COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


class ChatRequest(Several, Tooled):
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


class CompletionRequest(Several):
    """The body of /v1/completions."""

    asks = "prompt"
    default_limit = COMPLETION_TOKENS

    prompt: Annotated[list[str | list[int]], PlainValidator(read_prompts), TEXT_OR_IDS] = Field(
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

    @field_validator("logprobs", mode="before")
    @classmethod
    def _no_logprobs(cls, value: Any) -> Any:
        return None if value is False else value

    def prompts(self) -> Sequence[Prompt]:
        return self.prompt

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
    formats = ("structured_outputs", "text_grammar")

    input: Annotated[
        list[dict[str, Any]],
        PlainValidator(read_items),
        WithJsonSchema({"title": "text or a list of messages and calls"}),
    ] = Field(description="what is answered")
    tools: Annotated[list[dict[str, Any]], PlainValidator(read_flat_tools), FUNCTIONS] = Field(
        [], description="functions that the answer may call"
    )
    tool_choice: Annotated[str | tuple[str], PlainValidator(read_flat_choice), CHOICE] = Field(
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
    text: Annotated[TextFormat, PlainValidator(read_text_format), OBJECT] = Field(
        ANY_TEXT, description="`format`: `json_object`, or `json_schema` with a schema"
    )
    reasoning: Annotated[Reasoning, an_object(REASONING, "reasoning"), OBJECT] = Field(
        Reasoning(), description="the effort is a variable of the chat template"
    )

    @property
    def text_grammar(self) -> AskedGrammar | None:
        return self.text.grammar

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

    gamma: int | None = Field(None, ge=1, description="the depth of drafts, as `--gamma`")
    policy: str | None = Field(
        None, examples=sorted(POLICIES), description="the policy with its options, as `--policy`"
    )
    rule: str | None = Field(
        None,
        examples=sorted(RULES),
        description='the rule with its options: `"typical:epsilon=0.1"`',
    )
    lenience: float | None = Field(
        None, gt=0, le=1, description="l: short for the rule `lenience:lenience=l`; 1: the default"
    )
    dynamic_lenience: float | None = Field(
        None, gt=0, le=1, description="the lower bound of l in spikes of traffic; 1: off"
    )
    drafter: str | None = Field(
        None,
        min_length=1,
        description="`none`, `ngram` and `store` with their options, a path below `--drafters`, "
        "several with `+`, or the one of the start",
    )
    learning: bool | None = Field(None, description="whether the drafter learns; needs `--learn`")

    @classmethod
    def fields(cls) -> dict[str, dict[str, Any]]:
        """The JSON schema of each field, without null."""
        fields = {}
        for name, schema in cls.model_json_schema()["properties"].items():
            kind = next(x for x in schema.get("anyOf", [schema]) if x.get("type") != "null")
            known = {key: schema[key] for key in ("examples",) if key in schema}
            fields[name] = {**kind, **known}
        return fields


class AdapterUnload(RequestPart):
    """The body of POST /v1/unload_lora_adapter, as in vLLM."""

    lora_name: str = Field(
        min_length=1, max_length=LONGEST_LABEL, description="the label of its requests"
    )


class AdapterLoad(AdapterUnload):
    """The body of POST /v1/load_lora_adapter, as in vLLM."""

    lora_path: str = Field(
        min_length=1, description="the directory of an adapter, a path below `--adapters`"
    )


CHAT = KnownFields(
    ChatRequest,
    ignored_by(ChatRequest),
    REFUSED,
)
COMPLETION = KnownFields(CompletionRequest, IGNORED, REFUSED)
RESPONSES = KnownFields(
    ResponsesRequest,
    ignored_by(ResponsesRequest),
    REFUSED
    | {
        "one text is given, to its end": {"n": (1,), "stop": ([], "")},
        "templates of prompts are not kept": {"prompt": ()},
        "use text.format": {"response_format": ({"type": "text"}, {})},
        "token ids are given by /v1/completions and chat only": {"return_token_ids": (False,)},
    },
)
SETTINGS = KnownFields(SettingsChange)
_NUMBERED = {"lora_int_id": "adapters have names only"}
ADAPTER_LOAD = KnownFields(
    AdapterLoad, _NUMBERED, {"an adapter is dropped first": {"load_inplace": (False,)}}
)
ADAPTER_UNLOAD = KnownFields(AdapterUnload, _NUMBERED)
