"""/v1/messages: Anthropic's shape of requests, answers, events and errors."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from draftsmith.net.api_error import ApiError
from draftsmith.serve.anthropic.messages_answer import as_anthropic
from draftsmith.serve.anthropic.messages_request import MESSAGES
from draftsmith.serve.openai.known_fields import parse
from tests.service import CHAT, MODEL, QUESTION, Running, chat, serving, text_of
from tests.test_serve_tools import TOOLS, target

PATH = "/v1/messages"
SAID = [{"role": "user", "content": QUESTION}]
FUNCTIONS: list[Any] = [
    {"name": one["function"]["name"], "input_schema": one["function"]["parameters"]}
    for one in TOOLS
]
USE = {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    with serving(target("hermes"), api_key="secret") as running:
        yield running


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 12, "messages": SAID, "temperature": 0} | fields


def post(service: Running, path: str = PATH, **fields: Any) -> Any:
    with service.client() as client:
        answer = client.post(path, json=body(**fields), headers={"x-api-key": "secret"})
    assert answer.status_code == 200, answer.text
    return answer


def said_in_a_chat(service: Running, **fields: Any) -> str:
    """The same question's answer by the route of chats."""
    with service.client() as client:
        asked = chat(QUESTION, max_tokens=12, temperature=0) | fields
        return text_of(client.post(CHAT, json=asked, headers={"Authorization": "Bearer secret"}))


def events_of(text: str) -> list[dict[str, Any]]:
    found = []
    for one in text.strip().split("\n\n"):
        name, data = (line.partition(": ")[2] for line in one.split("\n"))
        found.append(json.loads(data))
        assert found[-1]["type"] == name
    return found


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of events: each block begins, grows and stops in turn."""
    first, *middle, last, end = events
    assert [first["type"], last["type"], end["type"]] == [
        *("message_start", "message_delta", "message_stop")
    ]
    message, opened = first["message"], None
    for one in middle:
        match one["type"]:
            case "content_block_start":
                assert opened is None
                opened = len(message["content"])
                message["content"].append(one["content_block"])
                parts = ""
            case "content_block_delta":
                delta = one["delta"]
                parts += delta.get("text", delta.get("partial_json"))
            case "content_block_stop":
                block = message["content"][opened]
                block |= (
                    {"text": parts} if block["type"] == "text" else {"input": json.loads(parts)}
                )
                opened = None
        assert one["index"] == len(message["content"]) - 1
    assert opened is None
    message["usage"] |= last["usage"]
    return message | last["delta"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "max_tokens"),
        ({"system": [{"type": "text", "text": "Be brief.", "cache_control": {}}]}, "max_tokens"),
        ({"tools": FUNCTIONS, "tool_choice": {"type": "any"}, "max_tokens": 200}, "tool_use"),
        (
            {"tools": FUNCTIONS, "tool_choice": {"type": "tool", "name": "now"}, "max_tokens": 99},
            "tool_use",
        ),
    ],
    ids=["text", "system", "any", "tool"],
)
def test_a_message_is_the_same_whole_and_in_events(
    service: Running, fields: dict[str, Any], reason: str
) -> None:
    whole = post(service, **fields).json()
    streamed = assembled(events_of(post(service, **fields, stream=True).text))
    assert whole["stop_reason"] == streamed["stop_reason"] == reason
    for message in (whole, streamed):
        for block in message["content"]:
            if block["type"] == "tool_use":
                block["id"] = ""
    assert whole["content"] == streamed["content"]
    assert whole["usage"]["output_tokens"] == streamed["usage"]["output_tokens"] > 0
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", MODEL)


def test_the_text_is_that_of_chat_and_a_stop_sequence_is_named(service: Running) -> None:
    text = said_in_a_chat(service)
    assert post(service).json()["content"] == [{"type": "text", "text": text}]
    stop = text[4:7]
    found = post(service, stop_sequences=["never said", stop]).json()
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", stop)
    assert found["content"][0]["text"] == text[: text.find(stop)]
    counted = post(service, "/v1/messages/count_tokens").json()
    usage = post(service).json()["usage"]
    read = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted == {"input_tokens": read}


def test_blocks_become_the_messages_of_a_chat() -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "?"}, {"type": "text", "text": "c"}, USE],
        },
        {
            "role": "user",
            "content": [
                RESULT | {"content": [{"type": "text", "text": "12"}], "is_error": True},
                {"type": "text", "text": "d"},
            ],
        },
    ]
    read = parse(MESSAGES, json.dumps(body(messages=turns, system="s")).encode())
    call = {"id": "toolu_1", "type": "function", "function": {"name": "now", "arguments": {}}}
    assert read.prompts() == [
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "a\nb"},
            {"role": "assistant", "content": "c", "tool_calls": [call]},
            {"role": "tool", "content": "12", "tool_call_id": "toolu_1"},
            {"role": "user", "content": "d"},
        ]
    ]


def test_turns_of_one_side_are_one_and_the_last_of_the_assistant_is_continued(
    service: Running,
) -> None:
    turns = [*SAID, {"role": "user", "content": "b"}, {"role": "assistant", "content": "It dr"}]
    read = parse(MESSAGES, json.dumps(body(messages=turns)).encode())
    assert read.prompts() == [[{"role": "user", "content": f"{QUESTION}\nb"}, turns[-1]]]
    one = {"messages": [{"role": "user", "content": f"{QUESTION}\nb"}, turns[-1]]}
    options = {"continue_final_message": True, "add_generation_prompt": False}
    text = said_in_a_chat(service, **one, **options)
    assert post(service, messages=turns).json()["content"] == [{"type": "text", "text": text}]


def test_an_answer_has_the_schema_of_its_format(service: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    asked = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
    found = post(service, output_config=asked, max_tokens=50).json()
    assert (json.loads(found["content"][0]["text"]), found["stop_reason"]) == (
        {"a": "x"},
        "end_turn",
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages.0.content.0.type",
        ),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages.0.content.0.type"),
        ({"system": 1}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": FUNCTIONS, "tool_choice": {"type": "any", "name": "now"}}, "tool_choice"),
        ({"tools": FUNCTIONS, "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice"),
        ({"stop_sequences": "x" * 300}, "stop_sequences"),
        ({"n": 2}, "n"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config"),
        ({"tools": [FUNCTIONS[0] | {"defer_loading": True}]}, "tools.0.defer_loading"),
        ({"mcp_servers": [1]}, "mcp_servers"),
    ],
)
def test_what_is_not_served_is_refused_by_its_place(fields: dict[str, Any], param: str) -> None:
    asked = {name: x for name, x in body(**fields).items() if x is not None}
    with pytest.raises(ApiError) as refused:
        parse(MESSAGES, json.dumps(asked).encode())
    assert refused.value.body["error"]["param"] == param


def test_one_call_at_most_is_asked_for_as_anthropic_does() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    read = parse(MESSAGES, json.dumps(body(tools=FUNCTIONS, tool_choice=choice)).encode())
    assert (read.tool_choice, read.parallel_tool_calls) == ("auto", False)


def test_errors_have_anthropics_types() -> None:
    statuses = (400, 413, 429, 500, 503)
    found = [as_anthropic(ApiError(status, "no"))["error"]["type"] for status in statuses]
    assert found == [
        *("invalid_request_error", "request_too_large", "rate_limit_error"),
        *("api_error", "overloaded_error"),
    ]


def test_errors_have_the_shape_of_the_route(service: Running) -> None:
    with service.client() as client:
        wrong = client.post(PATH, json=body(), headers={"x-api-key": "other"})
        key = {"x-api-key": "secret"}
        unknown = client.post(PATH, json=body(model="other"), headers=key)
        elsewhere = client.get("/v1/models", headers=key)
    assert (wrong.status_code, elsewhere.status_code) == (401, 401)
    assert unknown.status_code == 404
    assert unknown.json()["type"] == "error"
    assert unknown.json()["error"]["type"] == "not_found_error"
