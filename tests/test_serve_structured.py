"""Forced formats over HTTP: each answer fits its own, beside texts without one."""

import concurrent.futures
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from decode.drafters.lookup.ngram import NgramDrafter
from decode.draw.sampling import Sampling
from decode.settings import DecodeSettings
from draftsmith.serve.openai.contract import parse
from draftsmith.serve.openai.openai_requests import CHAT
from tests.service import MODEL, Running, chat, serving
from tests.tiny import tiny_target

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
OPENAI = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
FORMATS: list[dict[str, Any]] = [
    {"response_format": OPENAI},
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"structured_outputs": {"json": SCHEMA}},
    {"guided_regex": "[ab]{3}"},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"guided_grammar": 'start: "x" | "y"'},
    {},
]


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    with serving(tiny_target()) as running:
        yield running


def test_each_answer_fits_its_own_format(service: Running) -> None:
    def ask(place: int) -> tuple[dict[str, Any], dict[str, Any]]:
        fields = FORMATS[place % len(FORMATS)]
        body = chat(f"question {place}", max_tokens=40, temperature=place % 2, **fields)
        with service.client() as client:
            response = client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return fields, response.json()["choices"][0]

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, range(3 * len(FORMATS))))
    for fields, choice in answers:
        text = choice["message"]["content"]
        if not fields:
            continue
        assert choice["finish_reason"] == "stop"
        if "guided_regex" in fields:
            assert re.fullmatch("[ab]{3}", text)
        elif "guided_grammar" in fields:
            assert text in ("x", "y")
        elif "choice" in fields.get("structured_outputs", {}):
            assert text in ("yes", "no")
        else:
            found = json.loads(text)
            assert isinstance(found["ok"], bool)
            assert 0 <= found["n"] <= 9


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


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object", "schema": {"type": "x"}}}, "response_format"),
        ({"guided_json": {"type": "x"}}, "guided_json"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": [1]}, "guided_json"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_a_format_that_cannot_be_used_is_refused(
    fields: dict[str, Any], param: str, service: Running
) -> None:
    with service.client() as client:
        response = client.post("/v1/chat/completions", json=chat("a", **fields))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


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
