"""Grammars of the answers to rows that have a JSON Schema."""

from collections.abc import Iterable

from decode.base.errors import UserError
from decode.grammars import Grammar, Grammars
from decode.model.loading import Target
from train.data.read import Example


def row_grammars(examples: Iterable[Example], target: Target) -> dict[str | None, Grammar]:
    """The grammars of all schemas that the rows have, by schema: rows share them. Raises UserError
    with the row's place for a schema that cannot be used."""
    first = {example.schema: example for example in examples if example.schema is not None}
    made: dict[str | None, Grammar] = {}
    if not first:
        return made
    grammars = Grammars.of(target)
    for schema, example in first.items():
        assert schema is not None
        try:
            made[schema] = grammars.json_schema(schema)
        except UserError as error:
            raise UserError(f"{example.source}: {error}") from error
    return made
