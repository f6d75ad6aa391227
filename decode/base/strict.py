"""The base class of settings that a user writes."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """A part of the config. Unknown keys and wrong types are errors. Instances are immutable. A
    docstring under a field describes it."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True
    )
