"""The base classes of a config, and the types that several of its parts share."""

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_
from typing import Annotated, Any

from pydantic import BaseModel, Field, WithJsonSchema
from pydantic.json_schema import GenerateJsonSchema

from decode.base.errors import UserError, nearest
from decode.base.registry import Registry
from decode.base.strict import Strict
from distill.losses import LOSSES


class Untitled(GenerateJsonSchema):
    """JSON schemas without titles made of field names: a title is the description of a value in
    messages."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def part_of(registry: Registry[Any]) -> WithJsonSchema:
    """Annotates a setting that names a part, with or without options: the schema lists the
    names."""
    names = list(registry)
    options = {
        "title": "NAME:option=value,…",
        "type": "string",
        "pattern": f"^({'|'.join(names)}):",
    }
    mapping = {
        "title": "a mapping with name and options",
        "type": "object",
        "properties": {"name": {"enum": names, "type": "string"}},
        "required": ["name"],
    }
    return WithJsonSchema({"anyOf": [{"enum": names, "type": "string"}, options, mapping]})


def name_in(names: Iterable[str]) -> WithJsonSchema:
    """Annotates a setting that names a part without options."""
    return WithJsonSchema({"enum": list(names), "type": "string"})


def one_of(classes: Iterable[type[BaseModel]], tag: str) -> Any:
    """The type of a setting that is one of these classes. Its value of `tag` selects the class."""
    return Annotated[reduce(or_, classes), Field(discriminator=tag)]


_WEIGHT = {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "object"}]}
Losses = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "title": "a mapping of names and weights",
            "type": "object",
            "properties": dict.fromkeys(LOSSES, _WEIGHT),
            "additionalProperties": False,
        }
    ),
]


Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what all generators of random numbers take


class StageConfig(Strict):
    """The settings of every stage."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", title="a name of letters, digits, _ and -"
    )
    """The unique name of the stage. Later stages refer to the stage by this name."""
    kind: str
    """The kind of the stage, from the registry of stages."""


def closest_stage(name: str, stages: Sequence[StageConfig], *kinds: str) -> StageConfig:
    """The earlier stage with this name and one of these kinds. Otherwise raises UserError with
    the names of the stages of these kinds."""
    fitting = {stage.name: stage for stage in stages if stage.kind in kinds}
    if name not in fitting:
        raise UserError(
            f"no earlier stage {name!r} of kind {' or '.join(kinds)}; "
            f"{'expected one of' if fitting else 'there are'} {', '.join(fitting) or 'none'}."
            + nearest(name, fitting)
        )
    return fitting[name]
