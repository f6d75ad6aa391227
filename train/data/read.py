"""Reads prompts, conversations and texts, and counts every row.

A row is one JSON object: a line of a .jsonl file, an object of a .json array, or a row of a data
set. Its kind follows from its fields, see `train.data.row_kinds`. A .txt file has one text per
paragraph.

Optional: `id` (text or a whole number, unique), `kind` or `task` (a label for reports),
`json_schema` (an object or its JSON; a `generate` stage and an evaluation hold the answer to it).
Other fields are ignored, so data sets can be used unchanged.

Rows stay where they are: `Examples` knows their places and reads a row when it is asked for it.
"""

import hashlib
import json
from abc import abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from decode.base.errors import UserError
from train.data.file_sources import Raw, Source, changed
from train.data.row_kinds import (
    EXPECTED,
    KINDS,
    BadRow,
    Message,
    clean,
    parse_line,
    short,
    string,
    understand,
)
from train.data.sources import sources_of

BLOCK = 4096  # rows whose places are Python objects at a time
PROBLEMS_SHOWN = 20


@dataclass(frozen=True)
class Example:
    """One row that was read.

    `messages` is set for prompts and conversations, `text` for plain text. `prompt` is the
    user's text alone, for a tokenizer without a chat template; it is set if the conversation is one
    user message, answered or not. `source` is "file:line" (or "data set[split]:row"). `tools` are
    the definitions of the tools that the assistant could call. `schema` is the JSON Schema that an
    evaluation holds the answer to, as JSON.
    """

    id: str
    messages: tuple[Message, ...] | None
    prompt: str | None
    text: str | None
    kind: str | None
    source: str
    tools: tuple[dict[str, Any], ...] = ()
    schema: str | None = None

    def user_texts(self) -> list[str]:
        """What the user wrote: one text per message, or the whole text if there are none."""
        if self.messages is None:
            return [self.text or self.prompt or ""]
        return [turn["content"] for turn in self.messages if turn["role"] == "user"]


@dataclass
class ReadReport:
    """The counts of the rows. Always, read = kept + the sum of `dropped`."""

    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    files: list[str] = field(default_factory=list)
    # The first few bad rows in words, for the log of a run that skips them.
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        line = f"{self.read} read = {self.kept} kept + {self.dropped.total()} dropped"
        reasons = ", ".join(f"{reason}: {n}" for reason, n in sorted(self.dropped.items()))
        return f"{line} ({reasons})" if reasons else line


class Rows(Sequence[Example]):
    """Examples that are read when they are asked for."""

    @abstractmethod
    def select(self, rows: Sequence[int] | np.ndarray) -> "Rows":
        """The rows with these numbers, in this order."""

    @overload
    def __getitem__(self, row: int) -> Example: ...

    @overload
    def __getitem__(self, row: slice) -> "Rows": ...

    def __getitem__(self, row: int | slice) -> "Example | Rows":
        if isinstance(row, slice):
            return self.select(range(len(self))[row])
        return next(iter(self.select([range(len(self))[row]])))


class Examples(Rows):
    """Rows of sources, read when they are asked for. A row takes 36 bytes of memory.

    Raises UserError if a file changed since it was read first.
    """

    def __init__(
        self, sources: Sequence[Source], index: np.ndarray, keep_reasoning: bool = True
    ) -> None:
        """index: [n] of INDEX. keep_reasoning: whether the assistant's messages keep theirs."""
        self._sources, self._index, self._keep_reasoning = sources, index, keep_reasoning

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[Example]:
        for begin in range(0, len(self._index), BLOCK):
            block = self._index[begin : begin + BLOCK]
            borders = np.flatnonzero(np.diff(block["source"])) + 1
            for rows in np.split(block, borders):
                source = self._sources[rows["source"][0]]
                with source.opened() as read:
                    for _, number, start, size, _ in rows.tolist():
                        try:
                            raw = read(start, size)
                            yield _understand(source, number, raw, self._keep_reasoning)
                        except BadRow as bad:  # it was a good row
                            raise changed(source.name) from bad

    def select(self, rows: Sequence[int] | np.ndarray) -> "Examples":
        index = self._index[np.asarray(rows, np.int64)]
        return Examples(self._sources, index, self._keep_reasoning)

    @property
    def keys(self) -> np.ndarray:
        """uint64 [n]: `id_key` of each row."""
        return self._index["key"]


# Of a row: the number of its source, its `Place` there, and the key of its id.
INDEX = np.dtype(
    [("source", "i4"), ("number", "i8"), ("start", "i8"), ("size", "i8"), ("key", "u8")]
)


def id_key(name: str) -> int:
    """A hash of an id, below 2⁶⁴."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())


def id_keys(examples: Sequence[Example]) -> np.ndarray:
    """uint64 [n]: `id_key` of each example."""
    if isinstance(examples, Examples):
        return examples.keys
    return np.array([id_key(example.id) for example in examples], np.uint64)


def select(examples: Sequence[Example], rows: Sequence[int] | np.ndarray) -> Sequence[Example]:
    """The examples with these numbers, in this order."""
    if isinstance(examples, Rows):
        return examples.select(rows)
    return [examples[row] for row in rows]


def read_examples(
    source: str | list[str],
    *,
    limit: int | None = None,
    on_bad: Literal["stop", "skip"] = "stop",
    max_bad_rate: float = 0.01,
    base_dir: Path | None = None,
    reasoning: Literal["keep", "drop"] = "keep",
) -> tuple[Examples, ReadReport]:
    """Read all sources in order, and keep at most `limit` examples. Every row is checked now; it is
    read again when it is used.

    A source is a file, a directory of files or of a saved data set, or the name of a data set on
    the hub; see `train.data.sources`. Relative paths start at `base_dir`.

    With on_bad="stop", a bad row raises an error. With "skip" it is counted; an error is raised at
    the end if the share of bad rows is above `max_bad_rate`. Blank lines are not rows. reasoning:
    of the assistant's messages. If rows of different sources have the same id, the ids of all rows
    begin with the names of their sources.

    Raises UserError for a bad row ("FILE:LINE: found; expected"), too many bad rows, a missing or
    unreadable source, or if nothing is kept. A row with the id of an earlier row is a bad row.
    """
    names = [source] if isinstance(source, str) else list(source)
    keep_reasoning = reasoning == "keep"
    sources = sources_of(names, base_dir or Path())
    try:
        return _read(names, sources, limit, on_bad, max_bad_rate, keep_reasoning)
    except _SameIds:
        sources = sources_of(names, base_dir or Path(), name_ids=True)
        return _read(names, sources, limit, on_bad, max_bad_rate, keep_reasoning)


class _SameIds(Exception):
    """Rows of two sources have the same id."""


def _read(
    names: list[str],
    all_sources: Iterable[Source],
    limit: int | None,
    on_bad: Literal["stop", "skip"],
    max_bad_rate: float,
    keep_reasoning: bool,
) -> tuple[Examples, ReadReport]:
    report = ReadReport(files=names)
    sources: list[Source] = []
    columns = {name: array("Q" if name == "key" else "q") for name in INDEX.names or ()}
    seen: set[int] = set()
    for opened in all_sources:
        if limit is not None and report.kept >= limit:
            break
        sources.append(opened)
        for place, raw in opened.rows():
            if limit is not None and report.kept >= limit:
                break
            report.read += 1
            try:
                example = _understand(opened, place.number, raw, keep_reasoning)
                key = id_key(example.id)
                if key in seen:
                    _require_new(example, Examples(sources, _index(columns, key)), opened)
            except BadRow as bad:
                problem = f"{opened.name}:{place.number}: {bad.problem}"
                if on_bad == "stop":
                    raise UserError(
                        f'{problem}. Fix the row, or skip bad rows with on_bad "skip".'
                    ) from bad
                report.dropped[bad.reason] += 1
                if len(report.problems) < PROBLEMS_SHOWN:
                    report.problems.append(problem)
                continue
            seen.add(key)
            for name, value in zip(columns, (len(sources) - 1, *place, key), strict=True):
                columns[name].append(value)
            report.kept += 1

    bad_rows = report.dropped.total()
    if bad_rows > max_bad_rate * report.read:
        raise UserError(
            f"{bad_rows} of {report.read} rows are bad, more than the {max_bad_rate:.2%} that "
            f"max_bad_rate allows. The first: {report.problems[0]}. Fix the rows, or raise "
            f"max_bad_rate."
        )
    if not report.kept:
        raise UserError(
            f"no usable row in {', '.join(names) or 'an empty list of sources'}: {report}. "
            f"Expected at least one row such as {EXPECTED}."
        )
    return Examples(sources, _index(columns), keep_reasoning), report


def _index(columns: dict[str, "array[int]"], key: int | None = None) -> np.ndarray:
    """INDEX [n], or [1] of the first row with this key."""
    rows = slice(None)
    if key is not None:
        first = columns["key"].index(key)
        rows = slice(first, first + 1)
    index = np.empty(len(columns["key"][rows]), INDEX)
    for name, values in columns.items():
        index[name] = values[rows]
    return index


def _require_new(example: Example, earlier: Examples, source: Source) -> None:
    """Raise BadRow if the earlier example has the same id, or _SameIds if it is of another source
    and the ids do not name their sources yet. source: the source of the example."""
    [other] = earlier
    if other.id != example.id:
        return  # their keys are the same by chance
    if not source.names_ids and not other.source.startswith(f"{source.name}:"):
        raise _SameIds
    raise BadRow(
        "repeated id",
        f'the id "{example.id}" is also the id of {other.source}; expected unique ids, or none',
    )


def data_fingerprint(examples: Iterable[Example]) -> str:
    """SHA-256 of the examples' ids, content and order, but not of their location."""
    digest = hashlib.sha256()
    for e in examples:
        row = [e.id, e.messages, e.prompt, e.text, e.kind, *e.tools]
        row += [] if e.schema is None else [e.schema]
        digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def spread(items: Sequence[Any], count: int | None) -> list[Any]:
    """`count` items, spread evenly over the sequence. None: all items.

    Files are often ordered by kind, so the first items could all be of one kind.
    """
    if count is None or count >= len(items):
        return list(items)
    return [items[i * (len(items) - 1) // max(1, count - 1)] for i in range(count)]


def _understand(source: Source, number: int, raw: Raw, keep_reasoning: bool) -> Example:
    """The example in a row. Raises BadRow."""
    fields = parse_line(raw) if isinstance(raw, bytes) else raw
    # A data set has null if a row lacks a column that other rows have.
    fields = {key: value for key, value in fields.items() if value is not None}
    messages, text, tools = understand(fields, keep_reasoning)
    prompt = None
    if messages and [m["role"] for m in messages] in (["user"], ["user", "assistant"]):
        prompt = messages[0]["content"]
    kind = next((string(fields, name) for name in KINDS if name in fields), None)
    label = fields.get("id", f"{source.label}:{number}")
    if isinstance(label, float) and label.is_integer():
        label = int(label)  # a table has floats for whole numbers if some of them are missing
    if isinstance(label, bool) or not isinstance(label, str | int) or label == "":
        raise BadRow("wrong type", f"id is {short(label)}; expected text or a whole number")
    if source.names_ids and "id" in fields:
        label = f"{source.label}#{label}"
    where = f"{source.name}:{number}"
    schema = fields.get("json_schema")
    if schema is not None and not isinstance(schema, dict | str):
        raise BadRow(
            "wrong type", f"json_schema is {short(schema)}; expected an object, or its JSON"
        )
    if isinstance(schema, dict):
        schema = json.dumps(schema)
    return Example(clean(str(label), "id"), messages, prompt, text, kind, where, tools, schema)
