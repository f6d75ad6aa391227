"""Faults of grammars in a running service: each is one clear error or `length`."""

import concurrent.futures
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.service import Running, chat, serving
from tests.tiny import tiny_target

DEEP: dict[str, Any] = {"type": "integer"}
for _ in range(100):
    DEEP = {"type": "array", "items": DEEP, "minItems": 1}
TREE = {
    "type": "object",
    "properties": {"left": {"$ref": "#"}, "n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}
# Each with the status that it has.
FAULTS: list[tuple[dict[str, Any], int]] = [
    ({"guided_json": {"enum": []}}, 400),  # admits nothing
    ({"guided_json": {"type": "object", "required": ["a"], "additionalProperties": False}}, 400),
    ({"guided_json": {"$ref": "#"}}, 400),
    ({"guided_json": {"$ref": "#/$defs/none"}}, 400),
    ({"guided_json": {"enum": ["x" * 9] * 9000}}, 400),  # huge
    ({"guided_json": "{"}, 400),
    ({"guided_regex": "(a{1,999}){1,999}"}, 200),
    ({"guided_regex": "[ab]*a[ab]{300}c"}, 200),
    ({"guided_regex": "(a?){2000}a{2000}"}, 500),  # it explodes at its second token
    ({"guided_json": TREE}, 200),
    ({"guided_json": json.dumps(DEEP)}, 200),
    ({"guided_json": {"type": "string", "minLength": 500}}, 200),
    ({}, 200),
]


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    with serving(tiny_target()) as running:
        yield running


def test_faulty_and_sound_formats_beside_each_other(service: Running) -> None:
    def ask(place: int) -> None:
        fields, status = FAULTS[place % len(FAULTS)]
        with service.client() as client:
            body = chat(f"question {place}", max_tokens=12, temperature=place % 2, **fields)
            answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == status, (fields, answer.text)
        if status == 500:
            assert "too many expressions" in answer.json()["error"]["message"]
        if status == 400:
            assert answer.json()["error"]["param"] == next(iter(fields))
        if status != 200:
            return
        (choice,) = answer.json()["choices"]
        if "guided_regex" in fields:
            assert set(choice["message"]["content"]) <= {"a", "b"}
        elif fields and choice["finish_reason"] == "stop":
            json.loads(choice["message"]["content"])
        elif "minLength" in str(fields):
            assert choice["finish_reason"] == "length"  # in the middle of a string
            assert choice["message"]["content"].startswith('"')

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, range(3 * len(FAULTS))))
    service.until_idle()


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
