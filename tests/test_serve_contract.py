"""The contract of requests and answers, held against the types of the package openai: each field is
served, ignored or refused with a cause, and what is answered is what these types say."""

import json
import threading
import types
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Required, Union, get_args, get_origin, get_type_hints

import openai
import pytest
from openai.types import Completion, completion_create_params
from openai.types import chat as chat_types
from openai.types.responses import (
    Response,
    ResponseStreamEvent,
    response_create_params,
)
from pydantic import TypeAdapter

from decode.draw.sampling import Sampling
from draftsmith.net.api_error import LONGEST_MESSAGE, ApiError
from draftsmith.serve.openai.answers import event
from draftsmith.serve.openai.fields import IGNORED, REFUSED
from draftsmith.serve.openai.known_fields import UNKNOWN, KnownFields, parse, same
from draftsmith.serve.openai.openai_requests import CHAT, COMPLETION, RESPONSES, SETTINGS
from draftsmith.serve.openai.reading import SHORT, RequestLimits, longest_token
from draftsmith.serve.openai.text_request import TextRequest
from tests.service import (
    MODEL,
    QUESTION,
    Running,
    alone,
    ask,
    asked,
    chat,
    events,
    serving,
    target,
    words,
)
from tests.tiny import VOCAB, tiny_target

SAID = asked(QUESTION)
ROUTES: dict[str, tuple[KnownFields, Any, dict[str, Any]]] = {
    "chat": (
        CHAT,
        chat_types.completion_create_params.CompletionCreateParamsBase,
        {"messages": SAID},
    ),
    "completion": (
        COMPLETION,
        completion_create_params.CompletionCreateParamsBase,
        {"prompt": QUESTION},
    ),
    "responses": (
        RESPONSES,
        response_create_params.ResponseCreateParamsBase,
        {"input": QUESTION},
    ),
}
# What a field needs beside it.
BESIDE = {"top_logprobs": {"logprobs": True}, "stream_options": {"stream": True}}


LIMITS = RequestLimits(
    [MODEL], 512, None, texts=8, learns=False, vocabulary=VOCAB, sampling=Sampling()
)


def error_of(known: KnownFields, body: dict[str, Any]) -> dict[str, Any] | None:
    """What a request is refused with. None: it is taken."""
    try:
        request = parse(known, json.dumps(body).encode())
        if isinstance(request, TextRequest):
            LIMITS.sampling_of(request)
    except ApiError as error:
        answer: dict[str, Any] = error.body["error"]
        return answer
    return None


def samples(kind: Any, depth: int = 3) -> Iterator[Any]:
    """Values of a type, one for each of its alternatives."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        for one in inner:
            yield from samples(one, depth)
    elif origin is Literal:
        yield from inner
    elif origin is Required:
        yield from samples(inner[0], depth)
    elif origin in (list, Iterable, Sequence) or kind is Iterable:
        yield [next(samples(inner[0], depth - 1))]
    elif origin in (dict,):
        yield {"5": next(samples(inner[1], depth - 1))}
    elif isinstance(kind, type) and hasattr(kind, "__required_keys__"):
        hints = get_type_hints(kind, include_extras=True)
        needed = {name: x for name, x in hints.items() if get_origin(x) is Required}
        yield {name: next(samples(x, depth - 1)) for name, x in needed.items()}
    else:
        known = {str: "x", int: 1, float: 0.5, bool: True, type(None): None, object: {"a": 1}}
        yield known[kind]


@pytest.mark.parametrize("route", ROUTES)
def test_each_field_of_openai_is_served_ignored_or_refused_with_its_cause(route: str) -> None:
    known, kind, least = ROUTES[route]
    body = {"model": MODEL, "stream": False, **least}
    taken = {}
    for name, hint in get_type_hints(kind).items():
        cause, neutral = known.refusal(name)
        served, ignored = name in known.served.model_fields, name in known.ignored
        assert served or ignored or cause != UNKNOWN, name
        beside = BESIDE.get(name, {}) if route == "chat" or name == "stream_options" else {}
        for value in samples(hint):
            error = error_of(known, body | beside | {name: value})
            asks = value is not None and not any(same(value, one) for one in neutral)
            if not served and not ignored and asks:
                assert error is not None
                assert error["message"].startswith(f"{cause}: {name}"), error
                assert error["param"] == name
            elif error is not None:
                assert served, (name, value, error)
                assert error["param"].partition(".")[0] == name, (value, error)
            else:
                taken[name] = value
    served_names = {name for name in get_type_hints(kind) if name in known.served.model_fields}
    assert served_names <= set(taken), served_names - set(taken)


@pytest.mark.parametrize("route", ROUTES)
def test_values_that_ask_for_nothing_are_taken_alone(route: str) -> None:
    known, _, least = ROUTES[route]
    body = {"model": MODEL, **least}
    everything = {name: {"any": 1} for name in known.ignored}
    for fields in known.refused.values():
        for name, neutral in fields.items():
            if name in known.served.model_fields:
                continue
            everything |= dict.fromkeys((name,) * bool(neutral), next(iter(neutral), None))
            for one in neutral:
                assert error_of(known, body | {name: one}) is None, (name, one)
            asks = {"what": "is it?"}
            assert error_of(known, body | {name: asks}) is not None, name
    assert error_of(known, body | everything) is None
    twice = [name for fields in REFUSED.values() for name in fields]
    assert len(twice) == len(set(twice))
    assert not set(twice) & set(IGNORED)


@pytest.mark.parametrize(
    ("known", "fields", "said"),
    [
        (CHAT, {"functions": [1], "function_call": "x", "grammar": "x"}, "of tools, only "
         "functions are supported, in chats and responses: functions, function_call; forced "
         "formats have other names here: response_format, guided_* and structured_outputs: "
         "grammar"),
        (CHAT, {"bad_words": ["a"]}, "by logit_bias only: bad_words. Leave it out."),
        (CHAT, {"logit_bias": {"5": 101}}, "logit_bias of 5 is 101.0; expected a number from −100"),
        (CHAT, {"logit_bias": {"x": 1}}, "logit_bias has the key 'x'; expected a token id"),
        (CHAT, {"presence_penalty": 3}, "presence_penalty is 3.0; expected a number from −2 to 2"),
        (CHAT, {"stop_token_ids": ["x"]}, "stop_token_ids is a list of 1; expected a list"),
        (CHAT, {"min_tokens": 1, "guided_regex": "a"}, "min_tokens is 1 beside a forced format"),
        (CHAT, {"temprature": 1}, 'unknown to this service: temprature. Leave it out. Did you mean '
         '"temperature"?'),
        (CHAT, {f"x{n}": n for n in range(90_000)}, "x7 and 89992 more. Leave them out."),
        (CHAT, {"a" * 90_000: 1}, "a…. Leave it out."),
        (CHAT, {"temperature": 1e7}, "temperature is 10000000"),
        (CHAT, {"temperature": "x" * 90_000}, "expected a number"),
        (CHAT, {"n": 10**400}, "n: the number is too large"),
        (CHAT, {"max_tokens": 1.5}, "max_tokens is 1.5; expected a whole number ≥ 1"),
        (CHAT, {"stop": ["a", 5]}, "stop.1 is 5; expected text"),
        (CHAT, {"stream_options": {"include_usage": True}}, "without stream: true"),
        (CHAT, {"messages": [*SAID, {"role": "function", "content": "1"}]}, "and responses: "
         'messages.1.role is "function"'),
        (CHAT, {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
         "messages.0.tool_calls.0 is an object; expected"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "images, audio and files are not supported: messages.0.content.0.type"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages.0.content is missing"),
        (CHAT, {"messages": [5] * 90_000}, "messages.0 is 5; expected an object"),
        (CHAT, {"chat_template_kwargs": {"tokenize": False}}, "has tokenize, which is no variable"),
        (CHAT, {"continue_final_message": True}, "the last message is not the assistant's"),
        (COMPLETION, {"prompt": [1, "a"]}, 'prompt.1 is "a"; expected a token id'),
        (COMPLETION, {"prompt": [[1], ["a"]]}, 'prompt.1.0 is "a"; expected a token id'),
        (COMPLETION, {"prompt": [1.5] * 90_000}, "prompt is a list of 90000; expected text or"),
        (RESPONSES, {"previous_response_id": "r"}, "so send the whole conversation"),
        (RESPONSES, {"input": [{"type": "web_search_call"}]}, "in chats and responses: input"),
        (RESPONSES, {"metadata": {str(n): n for n in range(90_000)}}, "expected at most 64"),
        (SETTINGS, {str(n): n for n in range(90_000)}, "unknown to this service: 0, 1"),
    ],
)  # fmt: skip
def test_an_error_names_the_cause_and_the_place(
    known: KnownFields, fields: dict[str, Any], said: str
) -> None:
    least = {CHAT: {"messages": SAID}, COMPLETION: {"prompt": "a"}, RESPONSES: {"input": "a"}}
    body = {} if known is SETTINGS else {"model": MODEL, **least[known]}
    error = error_of(known, body | fields)
    assert error is not None
    assert said in error["message"]
    assert len(error["message"]) <= LONGEST_MESSAGE
    assert len(str(error["param"])) <= 200


def test_histories_of_other_clients_reach_the_template() -> None:
    body = {
        "model": MODEL,
        "messages": [
            {"role": "developer", "content": "be brief", "name": "app"},
            {"role": "user", "name": "me", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": []},
            {"role": "assistant", "content": "b", "refusal": None, "annotations": []},
        ],
        "top_k": -1, "seed": 5.0, "stop": ["", "x"], "max_tokens": 4.0,
        "continue_final_message": True,
    }  # fmt: skip
    asked = parse(CHAT, json.dumps(body).encode())
    assert asked.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"role": "assistant", "content": "b"},
    ]
    assert asked.sampling(Sampling()).top_k == 0
    assert (asked.seed, asked.stops, asked.max_tokens) == (5, ("x",), 4)
    assert asked.template == {"add_generation_prompt": False, "continue_final_message": True}


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_answers_and_events_are_of_the_types_of_openai(service: Running, path: str) -> None:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "top_p": 0.9}
    match path:
        case "chat/completions":
            body |= {"messages": SAID, "logprobs": True, "top_logprobs": 2}
            whole, part = (
                TypeAdapter[Any](chat_types.ChatCompletion),
                TypeAdapter[Any](chat_types.ChatCompletionChunk),
            )
        case "completions":
            body |= {"prompt": QUESTION, "logprobs": 2}
            whole, part = TypeAdapter[Any](Completion), TypeAdapter[Any](Completion)
        case _:
            body = {"model": MODEL, "input": QUESTION, "max_output_tokens": 12, "top_logprobs": 2}
            body |= {"include": ["message.output_text.logprobs"], "instructions": "Be brief."}
            whole, part = TypeAdapter[Any](Response), TypeAdapter[Any](ResponseStreamEvent)
    with service.client() as client:
        answer = client.post(f"/v1/{path}", json=body).json()
        whole.validate_python(answer, strict=True)
        options = dict.fromkeys(("include_usage", "continuous_usage_stats"), True)
        options["include_obfuscation"] = False
        streamed = body | {"stream": True, "stream_options": options}
        with client.stream("POST", f"/v1/{path}", json=streamed) as stream:
            chunks = [chunk for chunk in events(stream.iter_lines()) if chunk != "[DONE]"]
    for chunk in chunks:
        if path == "completions":  # the type is of whole answers, and OpenAI's chunks have null too
            for choice in chunk["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "stop"
        part.validate_python(chunk, strict=True)
    if path == "responses":
        assert [chunk["sequence_number"] for chunk in chunks] == list(range(len(chunks)))
        (given,), (content,) = (x["output"][0]["content"] for x in (answer, chunks[-1]["response"]))
        assert [x["token"] for x in given["logprobs"]] == [x["token"] for x in content["logprobs"]]
        deltas = [x for x in chunks if x["type"] == "response.output_text.delta"]
        assert "".join(x["delta"] for x in deltas) == content["text"] == given["text"]
        assert answer["status"] == "incomplete"
        assert answer["usage"]["output_tokens"] == 12
    else:
        *texts, last = chunks
        so_far = [chunk["usage"]["completion_tokens"] for chunk in texts]
        assert so_far == sorted(so_far)
        assert so_far[-1] == last["usage"]["completion_tokens"] == 12
        assert all(x["logprobs"] for x in texts[-1]["choices"])


def test_the_openai_client_gets_a_response_whole_and_streamed(service: Running) -> None:
    expected = words(alone(target(), SAID, 20))
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none") as client:
        options: dict[str, Any] = {"model": MODEL, "input": QUESTION, "max_output_tokens": 20}
        answer = client.responses.create(**options, store=True, metadata={"a": "b"})
        assert answer.output_text == expected
        assert (answer.metadata, answer.store) == ({"a": "b"}, False)
        with client.responses.stream(**options) as stream:
            *_, done, end = seen = list(stream)
        pieces = [x.delta for x in seen if x.type == "response.output_text.delta"]
        assert "".join(pieces) == done.item.content[0].text == expected
        assert (end.type, end.response.output_text) == ("response.incomplete", expected)
        with pytest.raises(openai.NotFoundError, match="answers are not kept"):
            client.responses.retrieve(answer.id)
        with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
            client.responses.create(**options, previous_response_id=answer.id)


def test_a_message_is_continued(service: Running) -> None:
    tokenizer = target().tokenizer
    messages = [*SAID, {"role": "assistant", "content": "The dog"}]
    ids = tokenizer.apply_chat_template(
        messages, continue_final_message=True, tokenize=True, return_dict=False
    )
    with service.client() as client:
        body = {"model": MODEL, "messages": messages, "max_tokens": 12}
        body |= {"continue_final_message": True, "add_generation_prompt": False}
        answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["choices"][0]["message"]["content"] == words(alone(target(), ids, 12))


def test_overflow_is_said_in_words_that_clients_know(service: Running) -> None:
    """LiteLLM and LangChain look for these words in the message."""
    longest = longest_token(target().tokenizer)
    assert longest is not None
    with service.client() as client:
        for text, limit, said in (
            ("dog " * 600, 4, "your prompt is too long: it has"),
            ("dog" * 600 * longest, 4, "tokens or more"),  # refused before it has tokens
            (QUESTION, 500, "you requested"),
        ):
            answer = ask(client, text, max_tokens=limit)
            error = answer.json()["error"]
            assert answer.status_code == 400
            assert error["code"] == "context_length_exceeded"
            assert (
                "This model's maximum context length is 512 tokens. However, " in error["message"]
            )
            assert said in error["message"]


def test_the_service_caps_lengths_and_completions_have_sixteen_tokens() -> None:
    with serving(target(), max_tokens=20) as running, running.client() as client:
        free: dict[str, Any] = {"ignore_eos": True}
        for path, body, length in (
            ("completions", {"prompt": "a", **free}, 16),
            ("completions", {"prompt": "a", "max_tokens": 400, **free}, 20),
            ("chat/completions", {"messages": SAID, **free}, 20),
        ):
            answer = client.post(f"/v1/{path}", json={"model": MODEL, **body}).json()
            assert answer["usage"]["completion_tokens"] == length


def test_every_answer_has_a_request_id_and_the_headers_of_its_status(service: Running) -> None:
    with service.client() as client:
        assert client.get("/health/").headers["x-request-id"].startswith("req_")
        for sent, kept in (("abc-1.2:3", True), ("a b", False), ("x" * 200, False)):
            answer = client.get("/nothing", headers={"x-request-id": sent})
            assert (answer.headers["x-request-id"] == sent) == kept
        answer = client.put("/v1/chat/completions")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert client.get("/v1/models/").json()["data"][0]["id"] == MODEL
        assert len(client.get("/" + "x" * 5000).text) < 2000


def test_the_default_name_has_no_colon_and_the_full_one_is_an_alias() -> None:
    named = tiny_target()
    named.name = "embedded:some-model"
    with serving(named) as running, running.client() as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "some-model"
        for name in ("some-model", "embedded:some-model"):
            body = {"model": name, "messages": SAID, "max_tokens": 2}
            answer = client.post("/v1/chat/completions", json=body).json()
            assert answer["model"] == "some-model"


def test_events_are_one_line_for_clients_that_cut_as_python_does() -> None:
    text = "a\u2028b\u2029c\x85d\x0be"
    (line,) = event({"text": text}).decode().rstrip("\n").splitlines()
    assert json.loads(line.removeprefix("data: ")) == {"text": text}


# --- the event loop -------------------------------------------------------------------------------


def bodies() -> dict[str, tuple[str, bytes]]:
    """The worst bodies of each kind: path and content."""
    many = 20_000
    return {
        "text": ("completions", json.dumps({"model": MODEL, "prompt": "ab " * many}).encode()),
        "messages": ("chat/completions", json.dumps(chat("a", messages=SAID * many)).encode()),
        "wrong": ("chat/completions", json.dumps(chat("a", messages=[5] * many)).encode()),
        "fields": ("completions", json.dumps({f"x{n}": n for n in range(many)}).encode()),
    }


@pytest.mark.parametrize("kind", bodies())
def test_health_is_answered_while_a_long_body_is_read(
    service: Running, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body is read only after /health has been answered, so it cannot be in the event loop."""
    path, body = bodies()[kind]
    assert len(body) > SHORT
    begun, answered = threading.Event(), threading.Event()
    reader: Any = service.service.reader
    read = reader._read

    def held(*args: Any) -> Any:
        begun.set()
        assert answered.wait(60)
        return read(*args)

    monkeypatch.setattr(reader, "_read", held)
    headers = {"content-type": "application/json"}
    with service.client() as client, ThreadPoolExecutor() as pool:
        waits = pool.submit(client.post, f"/v1/{path}", content=body, headers=headers)
        assert begun.wait(60)
        assert client.get("/health").status_code == 200
        answered.set()
        assert waits.result().status_code == 400
    assert reader.waiting == 0
