"""Forced formats: the fields of requests that ask for a grammar, as OpenAI and vLLM spell them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from decode.grammars import JSON_OBJECT

# vLLM's names of formats, and the methods of `decode.grammars.Grammars` that make them.
METHODS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark"}


class AskedGrammar(NamedTuple):
    """A grammar that a request asks for. field: of the request, for messages. method: of
    `decode.grammars.Grammars`. given: what it is called with."""

    field: str
    method: str
    given: Any


def read_response_format(value: Any) -> AskedGrammar | None:
    """OpenAI's `response_format`. None: any text. Raises ValueError for another form."""
    field = "response_format"
    if value == {}:
        return None
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_object", "schema": dict(schema)}:
            return AskedGrammar(field, "json_schema", schema)
        case {"type": "json_object"}:
            return AskedGrammar(field, "json_schema", JSON_OBJECT)
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return AskedGrammar(field, "json_schema", schema)
    raise ValueError(
        'expected {"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", '
        '"json_schema": {"name": …, "schema": {…}}}'
    )


class TextFormat(NamedTuple):
    """The `text` of /v1/responses: its format as it was given, and the grammar. None: any text."""

    given: Mapping[str, Any]
    grammar: AskedGrammar | None


ANY_TEXT = TextFormat({"type": "text"}, None)


def read_text_format(value: Any) -> TextFormat:
    """OpenAI's `text` of /v1/responses. Raises ValueError for another form."""
    given = value.get("format") or ANY_TEXT.given if isinstance(value, Mapping) else None
    if given is None or value.get("verbosity", "medium") not in (None, "medium"):
        raise ValueError('expected {"format": {…}}, with no other verbosity than medium')
    match given:
        case {"type": "json_schema", "name": str(), "schema": dict(schema)}:
            return TextFormat(given, AskedGrammar("text", "json_schema", schema))
        case {"type": "json_object"}:
            return TextFormat(given, AskedGrammar("text", "json_schema", JSON_OBJECT))
        case {"type": "text"}:
            return ANY_TEXT
    raise ValueError(
        'expected {"format": {"type": "text"}}, {"format": {"type": "json_object"}}, or {"format": '
        '{"type": "json_schema", "name": …, "schema": {…}}}'
    )


def read_structured_outputs(value: Any) -> AskedGrammar:
    """vLLM's `structured_outputs`. Raises ValueError unless it has one format."""
    given = {} if not isinstance(value, Mapping) else {k: x for k, x in value.items() if x}
    if len(given) == 1:
        ((name, asked),) = given.items()
        if name == "json_object":
            return AskedGrammar("structured_outputs", "json_schema", JSON_OBJECT)
        if name in METHODS:
            return AskedGrammar("structured_outputs", METHODS[name], asked)
    raise ValueError(f"expected one of {', '.join(METHODS)} and json_object")
