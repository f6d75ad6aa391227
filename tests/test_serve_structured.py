"""Forced formats over HTTP: each answer fits its own, beside texts without one."""

import concurrent.futures
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from draftsmith.serve.openai.contract import parse
from draftsmith.serve.openai.openai_requests import CHAT
from tests.service import Running, chat, serving
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


def test_values_that_ask_for_any_text() -> None:
    for value in ({"type": "text"}, {}, None):
        body = json.dumps(chat("a", model="m", response_format=value)).encode()
        assert parse(CHAT, body).grammar is None
