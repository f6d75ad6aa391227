"""The settings of a `datastore` stage."""

from typing import Literal

from pydantic import Field

from train.settings.text_settings import TextConfig


class DatastoreConfig(TextConfig):
    """A text as tokens with a suffix array, for drafts that are looked up (REST, 2311.08252). The
    text is the train split or answers, never the test split."""

    kind: Literal["datastore"] = "datastore"
    max_length: int = Field(1_000_000, ge=2)
    """The maximum length of a document in tokens, prompt included."""
    min_n: int = 2
    """The shortest end of a text that is looked up, in tokens."""
    max_n: int = 16
    """The longest end of a text that is looked up, in tokens: at most 16."""
    max_hits: int = 5000
    """How many places of a match are read. More of them are thinned out evenly."""
    tree_nodes: int | None = 64
    """The number of nodes of a draft. None: a path. The paper's 64 suit accelerators; on a CPU
    fewer are faster."""
