"""Reads prompts, conversations and texts, and counts every row.

A row is one JSON object: a line of a .jsonl file, an object of a .json array, or a row of a data
set. Its kind follows from its fields, see `train.data.row_kinds`. A .txt file has one text per
paragraph.

Optional: `id` (text or a whole number, unique), `kind` or `task` (a label for reports),
`json_schema` (an object or its JSON; a `generate` stage and an evaluation hold the answer to it).
Other fields are ignored, so data sets can be used unchanged.

A source is read once. `Examples` has its rows in an Arrow table, in memory or in a file.
"""

import hashlib
import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast, overload

import numpy as np

from decode.base.errors import UserError
from train.data.file_sources import Raw, RowSource
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

T = TypeVar("T", bound=Sequence["Example"])

BLOCK = 1024  # rows of a batch of the table: so many are Python objects at a time
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
    # The first few bad rows in words, for the log of a run that skips them.
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        line = f"{self.read} read = {self.kept} kept + {self.dropped.total()} dropped"
        reasons = ", ".join(f"{reason}: {n}" for reason, n in sorted(self.dropped.items()))
        return f"{line} ({reasons})" if reasons else line


class LazyExamples(Sequence[Example]):
    """Examples that are read when they are asked for."""

    @abstractmethod
    def select(self, rows: Sequence[int] | np.ndarray) -> "LazyExamples":
        """The rows with these numbers, in this order."""

    @overload
    def __getitem__(self, row: int) -> Example: ...

    @overload
    def __getitem__(self, row: slice) -> "LazyExamples": ...

    def __getitem__(self, row: int | slice) -> "Example | LazyExamples":
        if isinstance(row, slice):
            return self.select(range(len(self))[row])
        return next(iter(self.select([range(len(self))[row]])))


class Examples(LazyExamples):
    """Rows of an Arrow table, each made when it is asked for. A row takes 8 bytes of memory beside
    the table, which ranks map from one file.

    Its columns are text, and null for what a row lacks: id, text, kind, source and schema as in
    `Example`, and messages and tools as JSON. `key` is `id_key`, `content` is `content_key`.
    """

    def __init__(self, table: Any) -> None:
        """table: a `pyarrow.Table`. rows: int64, the numbers of the rows in it."""
        self._table, self._batches = table, table.to_batches()
        self._ends = np.cumsum([batch.num_rows for batch in self._batches])
        self._asks = table["messages"].is_valid().to_numpy()
        self._keys, self._contents = table["key"].to_numpy(), table["content"].to_numpy()
        self.rows = np.arange(len(table))

    @classmethod
    def stored(cls, file: Path) -> "Examples":
        """The rows that `read_examples` wrote to a file."""
        import pyarrow as pa  # type: ignore[import-untyped]

        return cls(pa.ipc.open_stream(pa.memory_map(str(file))).read_all())

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Example]:
        for begin in range(0, len(self.rows), BLOCK):
            rows = self.rows[begin : begin + BLOCK]
            numbers = np.searchsorted(self._ends, rows, side="right")
            for some in np.split(rows, np.flatnonzero(np.diff(numbers)) + 1):
                number = np.searchsorted(self._ends, some[0], side="right")
                batch = self._batches[number]
                places = some - (self._ends[number] - batch.num_rows)
                yield from map(_example, batch.take(places).to_pylist())

    def select(self, rows: Sequence[int] | np.ndarray) -> "Examples":
        found = copy(self)
        found.rows = self.rows[np.asarray(rows, np.int64)]
        return found

    def values(self, name: str) -> list[Any]:
        """The texts of one column."""
        return self._table[name].take(self.rows).to_pylist()

    @property
    def asks(self) -> np.ndarray:
        """bool [n]: which rows have messages."""
        return self._asks[self.rows]

    @property
    def keys(self) -> np.ndarray:
        """uint64 [n]: `id_key` of each row."""
        return self._keys[self.rows]

    @property
    def contents(self) -> np.ndarray:
        """uint64 [n]: `content_key` of each row."""
        return self._contents[self.rows]


COLUMNS = ("id", "messages", "text", "kind", "source", "tools", "schema")


def _example(row: dict[str, Any]) -> Example:
    messages = None if row["messages"] is None else tuple(json.loads(row["messages"]))
    tools = tuple(json.loads(row["tools"])) if row["tools"] else ()
    texts = {name: row[name] for name in ("id", "text", "kind", "source", "schema")}
    return Example(messages=messages, prompt=_prompt(messages), tools=tools, **texts)


def _prompt(messages: Sequence[Message] | None) -> str | None:
    alone = [m["role"] for m in messages or ()] in (["user"], ["user", "assistant"])
    return messages[0]["content"] if messages and alone else None


class _Writer:
    """Writes a table of examples, to a file or into memory."""

    def __init__(self, file: Path | None) -> None:
        import pyarrow as pa

        keys = [("key", pa.uint64()), ("content", pa.uint64())]
        self._schema = pa.schema([*((name, pa.string()) for name in COLUMNS), *keys])
        self._file = file
        self._sink = pa.BufferOutputStream() if file is None else pa.OSFile(str(file), "wb")
        self._stream = pa.ipc.new_stream(self._sink, self._schema)
        self._rows: list[dict[str, Any]] = []

    def add(self, example: Example, key: int) -> None:
        row = {name: getattr(example, name) for name in COLUMNS} | {"key": key}
        row["content"] = content_key(example)
        row["messages"] = None if example.messages is None else json.dumps(example.messages)
        row["tools"] = json.dumps(example.tools) if example.tools else None
        # A file's name may have bytes that are no text.
        row["source"] = example.source.encode(errors="replace").decode()
        self._rows.append(row)
        if len(self._rows) == BLOCK:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._rows:
            self._stream.write_batch(pa.RecordBatch.from_pylist(self._rows, self._schema))
        self._rows = []

    def close(self) -> None:
        self._sink.close()

    def examples(self) -> Examples:
        """What was written. Nothing more can be."""
        import pyarrow as pa

        self._flush()
        self._stream.close()
        if self._file is not None:
            self.close()
            return Examples.stored(self._file)
        return Examples(pa.ipc.open_stream(self._sink.getvalue()).read_all())


def id_key(name: str) -> int:
    """A hash of an id, below 2⁶⁴."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())


def content_key(example: Example) -> int:
    """A hash of what a tokenizer and a chat template read of an example, below 2⁶⁴."""
    return id_key(json.dumps([example.messages, example.text, example.tools]))


def content_keys(examples: Sequence[Example]) -> np.ndarray:
    """uint64 [n]: `content_key` of each example."""
    if isinstance(examples, Examples):
        return examples.contents
    return np.fromiter(map(content_key, examples), np.uint64, len(examples))


def id_keys(examples: Sequence[Example]) -> np.ndarray:
    """uint64 [n]: `id_key` of each example."""
    if isinstance(examples, Examples):
        return examples.keys
    return np.array([id_key(example.id) for example in examples], np.uint64)


def values(examples: Sequence[Example], name: str) -> list[Any]:
    """The id, kind, source or schema of each example. Of stored ones nothing else is read."""
    if isinstance(examples, Examples):
        return examples.values(name)
    return [getattr(example, name) for example in examples]


def asks(examples: Sequence[Example]) -> np.ndarray:
    """bool [n]: which examples have messages."""
    if isinstance(examples, Examples):
        return examples.asks
    return np.array([example.messages is not None for example in examples], bool)


def select(examples: T, rows: Sequence[int] | np.ndarray) -> T:
    """The examples with these numbers, in this order."""
    if isinstance(examples, LazyExamples):
        return cast(T, examples.select(rows))
    return cast(T, [examples[row] for row in rows])


def read_examples(
    source: str | list[str],
    *,
    limit: int | None = None,
    on_bad: Literal["stop", "skip"] = "stop",
    max_bad_rate: float = 0.01,
    base_dir: Path | None = None,
    reasoning: Literal["keep", "drop"] = "keep",
) -> tuple[Examples, ReadReport]:
    """Read all sources in order, and keep at most `limit` examples, in memory.

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
    settings = ReadSettings(limit, on_bad, max_bad_rate, reasoning)
    return read_sources(names, list(sources_of(names, base_dir or Path())), settings)


class ReadSettings(NamedTuple):
    """See `read_examples`."""

    limit: int | None = None
    on_bad: Literal["stop", "skip"] = "stop"
    max_bad_rate: float = 0.01
    reasoning: Literal["keep", "drop"] = "keep"


def read_sources(
    names: list[str], sources: Sequence[RowSource], settings: ReadSettings, file: Path | None = None
) -> tuple[Examples, ReadReport]:
    """`read_examples` of sources with these names. file: for the table. None: it is in memory."""
    try:
        return _read(names, sources, settings, file)
    except _SameIds:
        for source in sources:
            source.names_ids = True
        return _read(names, sources, settings, file)


class _SameIds(Exception):
    """Rows of two sources have the same id."""


def _read(
    names: list[str], sources: Sequence[RowSource], settings: ReadSettings, file: Path | None
) -> tuple[Examples, ReadReport]:
    limit, on_bad, max_bad_rate, reasoning = settings
    report = ReadReport()
    seen: dict[int, tuple[int, int]] = {}  # the number of the source of a key, and of its row
    with closing(_Writer(file)) as table:
        for origin, source in enumerate(sources):
            if limit is not None and report.kept >= limit:
                break
            for number, raw in source.rows():
                if limit is not None and report.kept >= limit:
                    break
                report.read += 1
                try:
                    example = _understand(source, number, raw, reasoning == "keep")
                    key = id_key(example.id)
                    if key in seen:
                        _refuse(example, sources[seen[key][0]], seen[key][1], source)
                except BadRow as bad:
                    problem = f"{source.name}:{number}: {bad.problem}"
                    if on_bad == "stop":
                        raise UserError(
                            f'{problem}. Fix the row, or skip bad rows with on_bad "skip".'
                        ) from bad
                    report.dropped[bad.reason] += 1
                    if len(report.problems) < PROBLEMS_SHOWN:
                        report.problems.append(problem)
                    continue
                seen[key] = origin, number
                table.add(example, key)
                report.kept += 1
        examples = table.examples()

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
    return examples, report


def _refuse(example: Example, other: RowSource, number: int, source: RowSource) -> None:
    """Raise BadRow for an example whose id is that of a row before, or _SameIds if that row is of
    another source and the ids do not name their sources yet. other, number: of the row before.
    source: of the example."""
    if not source.names_ids and other.name != source.name:
        raise _SameIds
    raise BadRow(
        "repeated id",
        f'the id "{example.id}" is also the id of {other.name}:{number}; expected unique ids, or '
        "none",
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


def _understand(source: RowSource, number: int, raw: Raw, keep_reasoning: bool) -> Example:
    """The example in a row. Raises BadRow."""
    fields = parse_line(raw) if isinstance(raw, bytes) else raw
    # A data set has null if a row lacks a column that other rows have.
    fields = {key: value for key, value in fields.items() if value is not None}
    messages, text, tools = understand(fields, keep_reasoning)
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
    if isinstance(schema, str):
        schema = clean(schema, "json_schema")
    name = clean(str(label), "id")
    return Example(name, messages, _prompt(messages), text, kind, where, tools, schema)
