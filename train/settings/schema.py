"""The base classes of a config, and the types that several of its parts share."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, Field, GetCoreSchemaHandler, WithJsonSchema
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from decode.base.errors import UserError, nearest
from decode.base.registry import registered_names
from decode.base.strict import Strict


class Untitled(GenerateJsonSchema):
    """JSON schemas without titles made of field names: a title is the description of a value in
    messages."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@dataclass(frozen=True)
class NameIn:
    """Annotates a setting that names a part, one of these names.

    with_options: options may follow the name, and the setting may be a mapping of both.
    """

    names: tuple[str, ...]
    with_options: bool = False

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._known, handler(kind))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: Any) -> dict[str, Any]:
        name = {"enum": [*self.names], "type": "string"}
        if not self.with_options:
            return name
        text = {
            "title": "NAME:option=value,…",
            "type": "string",
            "pattern": f"^({'|'.join(self.names)}):",
        }
        mapping = {
            "title": "a mapping with name and options",
            "type": "object",
            "properties": {"name": name},
            "required": ["name"],
        }
        return {"anyOf": [name, text, mapping]}

    def _known(self, value: Any) -> Any:
        if isinstance(value, dict) and "name" not in value:
            raise PydanticCustomError(NO_NAME, "a mapping without name")
        name = value["name"] if isinstance(value, dict) else value
        if self.with_options and isinstance(value, str):
            name = value.partition(":")[0]
        if name not in self.names:
            raise PydanticCustomError(OTHER_NAME, "no known name")
        return value


# Types of errors of a value, and of the name in it if it is a mapping.
NO_NAME, OTHER_NAME = "no_name", "other_name"


def part_in(package: str) -> NameIn:
    """Annotates a setting that names a part which a file of this package registers, with or without
    options."""
    return NameIn(registered_names(package), with_options=True)


def json_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of a class of settings, without titles made of the names of classes."""
    made = kind.model_json_schema(schema_generator=Untitled)
    for part in [made, *made.setdefault("$defs", {}).values()]:
        del part["title"]
    return made


def one_of(classes: Iterable[type[BaseModel]], tag: str) -> Any:
    """The type of a setting that is one of these classes. Its value of `tag` selects the class."""
    return Annotated[reduce(or_, classes), Field(discriminator=tag)]


def _checked(losses: dict[str, Any]) -> dict[str, Any]:
    """The losses, if there are any and they have these options. Only their code knows that, which
    imports torch, so plain ones are not asked."""
    if not losses or any(isinstance(given, dict) for given in losses.values()):
        from distill.losses import WeightedLoss

        try:
            WeightedLoss(losses)
        except UserError as error:
            raise ValueError(str(error)) from None
    return losses


_LOSSES = registered_names("distill.losses")
_READ_TEACHER = registered_names("distill.losses", without="needs_teacher: ClassVar[bool] = False")
_WEIGHT = {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "object"}]}
if TYPE_CHECKING:
    Losses = dict[str, Any]
else:
    Losses = Annotated[
        # An int stays one: runs compare and hash what they began with.
        dict[Literal[_LOSSES], Annotated[int | float, Field(gt=0)] | dict[str, Any]],
        AfterValidator(_checked),
        WithJsonSchema(
            {
                "title": "a mapping of names and weights",
                "type": "object",
                "minProperties": 1,
                "properties": dict.fromkeys(_LOSSES, _WEIGHT),
                "additionalProperties": False,
            }
        ),
    ]


def need_teacher(losses: Iterable[str]) -> bool:
    """Whether one of the losses with these names reads the target's distribution."""
    return any(name in _READ_TEACHER for name in losses)


Check = Callable[[], object]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what all generators of random numbers take


class StageConfig(Strict):
    """The settings of every stage."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", title="a name of letters, digits, _ and -"
    )
    """The unique name of the stage. Later stages refer to the stage by this name."""
    kind: str
    """The kind of the stage, from the registry of stages."""

    # Whether the target's layers may be on several devices, or offloaded (`target.device_map`).
    takes_device_map: ClassVar[bool] = False

    def checks(self, earlier: Sequence["StageConfig"]) -> Iterator[Check]:
        """Each raises UserError for settings that do not fit together, or for an earlier stage that
        does not fit. None of them depends on another one."""
        return iter(())

    def needs_complete_target(self) -> str | None:
        """The part of the config that needs the complete target in one process, for messages. None:
        the stage also works with a target that is sharded (`decode.model.sharded`)."""
        return f"kind: {self.kind}"


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
