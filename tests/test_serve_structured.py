"""Forced formats over HTTP: each answer fits its own, beside texts without one and beside faulty
formats, each of which is one clear error or `length`."""

import concurrent.futures
import copy
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from decode.drafters.lookup.ngram import NgramDrafter
from decode.draw.sampling import Sampling
from decode.settings import DecodeSettings
from draftsmith.serve.openai.known_fields import parse
from draftsmith.serve.openai.openai_requests import CHAT
from tests.service import MODEL, Running, ask, chat, serving, streamed
from tests.test_grammars import TOKENIZERS
from tests.test_serve_tools import TEMPLATES
from tests.tiny import as_target, shortened, tiny_target

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
OPENAI = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
DEEP: dict[str, Any] = {"type": "integer"}
for _ in range(100):
    DEEP = {"type": "array", "items": DEEP, "minItems": 1}
TREE = {
    "type": "object",
    "properties": {"left": {"$ref": "#"}, "n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}
TOKENS, FEW = 40, 12


def fits_schema(text: str) -> bool:
    found = json.loads(text)
    return isinstance(found["ok"], bool) and 0 <= found["n"] <= 9


def has_a_and_b(text: str, reason: str) -> bool:
    return set(text) <= {"a", "b"}


def is_json_at_its_end(text: str, reason: str) -> bool:
    return reason == "length" or json.loads(text) is not None


Fits = Callable[[str, str], Any]  # of a text, and of why it ended
# Formats of which each text is whole within TOKENS.
WHOLE: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
    ({"response_format": OPENAI}, fits_schema),
    ({"guided_json": SCHEMA}, fits_schema),
    ({"guided_json": json.dumps(SCHEMA)}, fits_schema),
    ({"structured_outputs": {"json": SCHEMA}}, fits_schema),
    ({"guided_regex": "[ab]{3}"}, re.compile("[ab]{3}").fullmatch),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no").__contains__),
    ({"guided_grammar": 'start: "x" | "y"'}, ("x", "y").__contains__),
]
# And others, of which FEW are asked for.
OTHERS: list[tuple[dict[str, Any], Fits]] = [
    ({"guided_regex": "(a{1,999}){1,999}"}, has_a_and_b),
    ({"guided_regex": "[ab]*a[ab]{300}c"}, has_a_and_b),
    ({"guided_json": TREE}, is_json_at_its_end),
    ({"guided_json": json.dumps(DEEP)}, is_json_at_its_end),
    # It ends in the middle of a string.
    (
        {"guided_json": {"type": "string", "minLength": 500}},
        lambda text, reason: text.startswith('"') and reason == "length",
    ),
    ({}, lambda text, reason: True),
]
# The fault is in their first field.
REFUSED: list[dict[str, Any]] = [
    {"guided_json": {"enum": []}},  # admits nothing
    {"guided_json": {"type": "object", "required": ["a"], "additionalProperties": False}},
    {"guided_json": {"$ref": "#"}},
    {"guided_json": {"$ref": "#/$defs/none"}},
    {"guided_json": {"enum": ["x" * 9] * 9000}},  # huge
    {"guided_json": "{"},
    {"response_format": {"type": "json_object", "schema": {"type": "x"}}},
    {"guided_json": {"type": "x"}},
    {"response_format": {"type": "xml"}},
    {"guided_regex": "("},
    {"guided_choice": []},
    {"guided_json": [1]},
    {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
    {"guided_choice": ["a"], "guided_regex": "a"},
    {"ignore_eos": True, "guided_regex": "a"},
]
EXPLODES = {"guided_regex": "(a?){2000}a{2000}"}  # at its second token


def test_each_answer_fits_its_own_format_beside_faulty_ones(service: Running) -> None:
    def ended(check: Callable[[str], Any]) -> Fits:
        return lambda text, reason: reason == "stop" and check(text)

    sound = [*((fields, ended(check)) for fields, check in WHOLE), *OTHERS]
    formats: list[tuple[dict[str, Any], Fits | None]] = [*sound, *((x, None) for x in REFUSED)]
    formats.append((EXPLODES, None))

    def ask_for(place: int) -> None:
        drawn, which = divmod(place, len(formats))
        fields, fits = formats[which]
        asked = {"max_tokens": TOKENS if which < len(WHOLE) else FEW, "temperature": drawn}
        with service.client() as client:
            answer = ask(client, f"question {place}", **asked, **fields)
        if fits is not None:
            assert answer.status_code == 200, (fields, answer.text)
            (choice,) = answer.json()["choices"]
            assert fits(choice["message"]["content"], choice["finish_reason"]), (fields, choice)
        elif fields is EXPLODES:
            assert answer.status_code == 500
            assert "too many expressions" in answer.json()["error"]["message"]
        else:
            assert answer.status_code == 400, (fields, answer.text)
            assert answer.json()["error"]["param"] == next(iter(fields))

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(ask_for, range(2 * len(formats))))
    service.until_idle()


def test_a_response_has_the_format_of_its_text(service: Running) -> None:
    form = {"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA}
    body = {"model": MODEL, "input": "a", "max_output_tokens": 60, "text": {"format": form}}
    with service.client() as client:
        answer = client.post("/v1/responses", json=body).json()
        wrong = client.post("/v1/responses", json=body | {"text": {"format": {"type": "xml"}}})
    assert answer["status"] == "completed"
    assert answer["text"] == {"format": form}
    assert set(json.loads(answer["output"][0]["content"][0]["text"])) == {"ok", "n"}
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "text")


def test_penalties_are_those_of_the_loop(service: Running) -> None:
    said = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {"7": 3, "9": -100}}
    said |= {"min_tokens": 5, "stop_token_ids": [11, 12]}
    settings = DecodeSettings(gamma=3, sampling=Sampling(**said))
    prompt = [5, 6, 7, 8]
    with service.client() as client:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 30, "return_token_ids": True}
        answer = client.post("/v1/completions", json=body | said).json()["choices"][0]
        ended = client.post(
            "/v1/completions", json=body | {"stop_token_ids": [answer["token_ids"][0]]}
        )
        for wrong in (
            {"logit_bias": {"100000": 1}},
            {"stop_token_ids": [100000]},
            {"min_tokens": 31},
        ):
            refused = client.post("/v1/completions", json=body | wrong)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == next(iter(wrong))
    decoder = settings.decoder(tiny_target(), NgramDrafter(1, 2))[0]
    assert answer["token_ids"] == decoder.decode([prompt], 30).outputs[0]
    assert ended.json()["choices"][0]["finish_reason"] == "stop"


def test_values_that_ask_for_any_text() -> None:
    for value in ({"type": "text"}, {}, None):
        body = json.dumps(chat("a", model="m", response_format=value)).encode()
        assert parse(CHAT, body).grammar is None


def test_a_text_goes_on_with_its_grammar_after_a_failed_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And after its prompt was in the prefix cache."""
    schema = {"type": "array", "items": {"enum": [10, 20]}, "minItems": 12, "maxItems": 12}
    body = chat("count", max_tokens=200, temperature=0, guided_json=schema)
    with serving(tiny_target()) as running, running.client() as client:
        (sound,) = client.post("/v1/chat/completions", json=body).json()["choices"]
        decoding = running.batcher._decoding
        verified, passes = decoding._verified, []

        def failing(*args: Any) -> Any:
            passes.append(len(decoding.rows))
            if passes[-3:] == [2, 2, 2]:
                raise RuntimeError("the device is away")
            return verified(*args)

        monkeypatch.setattr(decoding, "_verified", failing)
        two = chat("other", max_tokens=200, temperature=0, guided_json=schema)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            asks = [pool.submit(client.post, "/v1/chat/completions", json=x) for x in (body, two)]
            answers = [ask.result().json() for ask in asks]
    assert passes[-3:] == [2, 2, 2]
    for answer in answers:
        (choice,) = answer["choices"]
        found = json.loads(choice["message"]["content"])
        assert len(found) == 12
        assert set(found) <= {10, 20}
    assert answers[0]["choices"][0]["message"] == sound["message"]


TOOL = {
    "type": "function",
    "function": {
        "name": "say",
        "parameters": {
            "type": "object",
            "properties": {"text": {"const": ""}},
            "required": ["text"],
            "additionalProperties": False,
        },
    },
}


def with_mark(mark: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Formats with the text of a token in them, each with the only text that it allows."""
    written = json.dumps(mark, ensure_ascii=False)
    yield {"guided_regex": f"a{re.escape(mark)}{re.escape(mark)}"}, f"a{mark}{mark}"
    yield {"guided_choice": [f" {mark} b"]}, f" {mark} b"  # also the blank before it
    yield {"guided_json": {"const": mark}}, written
    constant = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"const": f" {mark}"}},
    }
    yield {"response_format": constant}, f'" {written[1:]}'
    tool: Any = copy.deepcopy(TOOL)
    tool["function"]["parameters"]["properties"]["text"]["const"] = mark
    called = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    yield called, json.dumps({"text": mark})


def said(message: dict[str, Any]) -> str:
    """The text, or the arguments of the one call, of a message or of the deltas of one."""
    for call in message.get("tool_calls") or ():
        return json.dumps(json.loads(call["function"]["arguments"]))
    return str(message.get("content") or "")


@pytest.mark.parametrize(
    "kind",
    # `test_grammars` has all of them without a service.
    shortened(TOKENIZERS, ["added and special", "byte fallback"]),
)
def test_the_text_of_an_added_token_is_written_through_the_service(kind: str) -> None:
    """With tokenizers that have it as a token, as a special one, or as letters or bytes."""
    made, tokenizer = tiny_target(max_positions=1024), copy.deepcopy(TOKENIZERS[kind]())
    tokenizer.chat_template = TEMPLATES["hermes"]
    model = copy.deepcopy(made.model)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for config in (model.config, model.generation_config):
        config.eos_token_id = tokenizer.eos_token_id
    marks = ["<tool_call>", "<think>", "<|im_end|>", "</s>", "naïf"]
    with serving(as_target(model, tokenizer, MODEL)) as running, running.client() as client:
        for mark in marks:
            for fields, expected in with_mark(mark):
                body = chat("a", max_tokens=200, temperature=1, seed=3, **fields)
                answer = client.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, (mark, fields, answer.text)
                (choice,) = answer.json()["choices"]
                assert said(choice["message"]) == expected, (mark, fields, choice)
                deltas = [x["choices"][0]["delta"] for x in streamed(client, body)]
                calls = [delta for delta in deltas if delta.get("tool_calls")]
                text = "".join(delta.get("content") or "" for delta in deltas)
                assert said(calls[0] if calls else {"content": text}) == expected, (mark, fields)
