"""The settings of a `datastore` stage."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from train.settings.text_settings import TextConfig


class DatastoreConfig(TextConfig):
    """A text as tokens with a suffix array, for drafts that are looked up (REST, 2311.08252). The
    text is the train split or answers, never the test split."""

    kind: Literal["datastore"] = "datastore"
    max_length: int = Field(1_000_000, ge=2)
    """The maximum length of a document in tokens, prompt included."""
    min_n: int = Field(2, ge=1)
    """The shortest end of a text that is looked up, in tokens."""
    max_n: int = Field(16, ge=1, le=16)
    """The longest end of a text that is looked up, in tokens: at most 16."""
    max_hits: int = Field(5000, ge=1)
    """How many places of a match are read. More of them are thinned out evenly."""
    tree_nodes: int | None = Field(64, ge=1, le=1024)
    """The number of nodes of a draft. None: a path. The paper's 64 suit accelerators; on a CPU
    fewer are faster."""

    takes_device_map: ClassVar[bool] = True

    def needs_complete_target(self) -> str | None:
        return None

    @model_validator(mode="after")
    def _fits(self) -> "DatastoreConfig":
        if self.min_n > self.max_n:
            raise ValueError(f"min_n is {self.min_n}; expected at most max_n, {self.max_n}")
        return self
