"""The base class of settings that a user writes."""

from collections.abc import Iterator
from typing import TypeVar

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """A part of the config. Unknown keys and wrong types are errors. Instances are immutable. A
    docstring under a field describes it."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True
    )


S = TypeVar("S", bound=Strict)


def kinds_of(base: type[S], tag: str) -> dict[str, type[S]]:
    """The kinds of a part, sorted by name: the subclasses with a default of the field `tag`."""
    named = {kind.model_fields[tag].default: kind for kind in _subclasses(base)}
    return {name: named[name] for name in sorted(x for x in named if isinstance(x, str))}


def _subclasses(base: type[S]) -> Iterator[type[S]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _subclasses(kind)
