"""Grammars of the answers to rows that have a JSON Schema."""

from collections.abc import Sequence

from decode.base.errors import UserError
from decode.grammars import Grammar, Grammars
from decode.model.loading import Target
from train.data.read import Example, values


def row_grammars(examples: Sequence[Example], target: Target) -> dict[str | None, Grammar]:
    """The grammars of all schemas that the rows have, by schema: rows share them. Raises UserError
    with the row's place for a schema that cannot be used."""
    schemas = values(examples, "schema")
    rows = {schema: row for row, schema in enumerate(schemas) if schema is not None}
    made: dict[str | None, Grammar] = {}
    if not rows:
        return made
    grammars = Grammars.of(target)
    for schema, row in rows.items():
        try:
            made[schema] = grammars.json_schema(schema)
        except UserError as error:
            raise UserError(f"{examples[row].source}: {error}") from error
    return made
