"""Reads prompts, conversations and texts, and counts every row.

A row is one JSON object: a line of a .jsonl file, an object of a .json array, or a row of a data
set. Its kind follows from its fields, see `train.data.rows`. A .txt file has one text per
paragraph.

Optional: `id` (text or a whole number, unique), `kind` or `task` (a label for reports). Other
fields are ignored, so data sets can be used unchanged.
"""

import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from decode.errors import UserError, nearest
from train.data.rows import (
    EXPECTED,
    FIELDS,
    BadRow,
    Message,
    clean,
    parse_line,
    short,
    string,
    understand,
)

# The builder of `datasets` for each type of file. This module reads the other types itself: in a
# table of Arrow, all rows of a column have one type, and contents of messages have several.
BUILDERS = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
LINES = (".jsonl", ".ndjson")
ARRAY, PARAGRAPHS = ".json", ".txt"
OWN_TYPES = (*LINES, ARRAY, PARAGRAPHS)
MARK = b"\xef\xbb\xbf"  # of UTF-8, at the start of a file
PROBLEMS_SHOWN = 20


@dataclass(frozen=True)
class Example:
    """One row that was read.

    `messages` is set for prompts and conversations, `text` for plain text. `prompt` is the
    user's text alone, for a tokenizer without a chat template; it is set if the conversation is one
    user message, answered or not. `source` is "file:line" (or "data set[split]:row").
    """

    id: str
    messages: tuple[Message, ...] | None
    prompt: str | None
    text: str | None
    kind: str | None
    source: str

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


@dataclass(frozen=True)
class _Row:
    """A row before parsing: the raw line of a file, or the mapping of a data set."""

    raw: bytes | dict[str, Any]
    label: str  # the id of the row if it has none
    source: str


def read_examples(
    source: str | list[str],
    *,
    split: str | None = None,
    limit: int | None = None,
    on_bad: Literal["stop", "skip"] = "stop",
    max_bad_rate: float = 0.01,
    base_dir: Path | None = None,
) -> tuple[list[Example], ReadReport]:
    """Read all sources in order, and keep at most `limit` examples.

    A source is a .jsonl, .json or .txt file, a file or directory that `datasets` reads (parquet,
    csv, arrow, `save_to_disk`), or the name of a data set on the hub. Relative paths start at
    `base_dir`. `split` picks the split of a data set; .jsonl, .json and .txt files have none.

    With on_bad="stop", a bad row raises an error. With "skip" it is counted; an error is raised at
    the end if the share of bad rows is above `max_bad_rate`. Blank lines are not rows.

    Raises UserError for a bad row ("FILE:LINE: found; expected"), too many bad rows, a missing or
    unreadable source, a repeated id, or if nothing is kept.
    """
    sources = [source] if isinstance(source, str) else list(source)
    report = ReadReport(files=sources)
    examples: list[Example] = []
    seen: dict[str, str] = {}
    for row in _rows(sources, split, base_dir or Path()):
        if limit is not None and report.kept >= limit:
            break
        report.read += 1
        try:
            example = _understand(row)
        except BadRow as bad:
            problem = f"{row.source}: {bad.problem}"
            if on_bad == "stop":
                raise UserError(
                    f'{problem}. Fix the row, or skip bad rows with on_bad "skip".'
                ) from bad
            report.dropped[bad.reason] += 1
            if len(report.problems) < PROBLEMS_SHOWN:
                report.problems.append(problem)
            continue
        if example.id in seen:
            raise UserError(
                f'{example.source}: the id "{example.id}" is also the id of {seen[example.id]}; '
                f"expected unique ids. Change one of the two, or leave the ids out."
            )
        seen[example.id] = example.source
        examples.append(example)
        report.kept += 1

    bad_rows = report.dropped.total()
    if bad_rows > max_bad_rate * report.read:
        raise UserError(
            f"{bad_rows} of {report.read} rows are bad, more than the {max_bad_rate:.2%} that "
            f"max_bad_rate allows. The first: {report.problems[0]}. Fix the rows, or raise "
            f"max_bad_rate."
        )
    if not examples:
        raise UserError(
            f"no usable row in {', '.join(sources) or 'an empty list of sources'}: {report}. "
            f"Expected at least one row such as {EXPECTED}."
        )
    return examples, report


def data_fingerprint(examples: list[Example]) -> str:
    """SHA-256 of the examples' ids, content and order, but not of their location."""
    digest = hashlib.sha256()
    for e in examples:
        row = [e.id, e.messages, e.prompt, e.text, e.kind]
        digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def spread(items: Sequence[Any], count: int | None) -> list[Any]:
    """`count` items, spread evenly over the sequence. None: all items.

    Files are often ordered by kind, so the first items could all be of one kind.
    """
    if count is None or count >= len(items):
        return list(items)
    return [items[i * (len(items) - 1) // max(1, count - 1)] for i in range(count)]


def _rows(sources: list[str], split: str | None, base_dir: Path) -> Iterator[_Row]:
    names = Counter(Path(source).name for source in sources)
    for source in sources:
        # With the bare file name, ids stay the same when the data moves. Files with equal names
        # need their paths as well.
        path = base_dir / Path(source).expanduser()
        label = path.name if path.exists() and names[path.name] == 1 else source
        if path.suffix in OWN_TYPES and not path.is_dir():
            if split is not None:
                raise UserError(
                    f'{source}: split "{split}" is set, but a {path.suffix} file has no splits. '
                    f"Leave split out, or name the file of that split."
                )
            yield from _file_rows(path, source, label)
        else:
            yield from _data_set_rows(path, source, label, split)


def _file_rows(path: Path, source: str, label: str) -> Iterator[_Row]:
    read = {ARRAY: _array, PARAGRAPHS: _paragraphs}.get(path.suffix, _lines)
    try:
        with path.open("rb") as file:
            for number, raw in read(file, source):
                yield _Row(raw, f"{label}:{number}", f"{source}:{number}")
    except FileNotFoundError:
        beside = [p.name for p in path.parent.glob("*")] if path.parent.is_dir() else []
        raise UserError(
            f"{source}: no such file (looked at {path.absolute()}).{nearest(path.name, beside)}"
        ) from None
    except OSError as error:
        raise UserError(f"{source}: cannot be read: {error.strerror} ({path})") from error


def _lines(file: BinaryIO, source: str) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, numbered from 1."""
    for number, line in enumerate(file, start=1):
        if number == 1:
            line = line.removeprefix(MARK)
        if line.strip():
            yield number, line


def _array(file: BinaryIO, source: str) -> Iterator[tuple[int, bytes | dict[str, Any]]]:
    """The objects of a JSON array, numbered from 0. The array may be the only list of an object,
    and a file with one object per line is read too."""
    content = file.read().removeprefix(MARK)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        lines = list(_lines(io.BytesIO(content), source))
        if len(lines) < 2 or not lines[0][1].lstrip().startswith(b"{"):
            raise UserError(
                f"{source}: broken JSON ({error}); expected an array of objects, or one object "
                "per line"
            ) from error
        yield from ((number - 1, line) for number, line in lines)
        return
    if isinstance(value, dict) and not any(name in value for name in FIELDS):
        lists = [entry for entry in value.values() if isinstance(entry, list)]
        value = lists[0] if len(lists) == 1 else [value]
    for number, entry in enumerate(value if isinstance(value, list) else [value]):
        yield number, entry if isinstance(entry, dict) else json.dumps(entry).encode()


def _paragraphs(file: BinaryIO, source: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The parts between blank lines, numbered by their first line, from 1."""
    first, lines = 0, list[str]()
    for number, line in enumerate(file, start=1):
        try:
            text = line.removeprefix(MARK).decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{source}:{number}: byte 0x{line[error.start]:02x} is not UTF-8; expected UTF-8 "
                "text"
            ) from error
        if text.strip():
            first = first if lines else number
            lines.append(text)
        elif lines:
            yield first, {"text": "".join(lines).strip()}
            lines = []
    if lines:
        yield first, {"text": "".join(lines).strip()}


def _data_set_rows(path: Path, source: str, label: str, split: str | None) -> Iterator[_Row]:
    # Imported here because the import takes a second, which other files do not need.
    import datasets

    try:
        if path.is_dir() and any(
            (path / marker).is_file() for marker in ("state.json", "dataset_dict.json")
        ):
            data = datasets.load_from_disk(str(path))
            if split is not None and isinstance(data, datasets.DatasetDict):
                if split not in data:
                    raise UserError(
                        f'{source}: no split "{split}"; expected one of {", ".join(data)}.'
                        f"{nearest(split, data)}"
                    )
                data = data[split]
        elif path.is_dir():
            data = datasets.load_dataset(str(path), split=split)
        elif path.is_file():
            if path.suffix not in BUILDERS:
                raise UserError(
                    f'{source}: cannot read files ending in "{path.suffix}"; expected '
                    f"{', '.join([*OWN_TYPES, *BUILDERS])} or a directory."
                )
            data = datasets.load_dataset(
                BUILDERS[path.suffix], data_files=str(path), split=split or "train"
            )
        elif path.suffix in BUILDERS or source.startswith((".", "/", "~")):
            raise UserError(f"{source}: no such file or directory (looked at {path.absolute()}).")
        else:
            data = datasets.load_dataset(source, split=split)
    except UserError:
        raise
    # `datasets` has no common base class for its errors, and they differ by version. The user must
    # fix any failure to open a source, so all become UserError, with the cause attached.
    except Exception as error:
        what = (
            "cannot be read"
            if path.exists()
            else f"neither a file ({path.absolute()}) nor a data set that could be loaded"
        )
        # "An error occurred while generating the dataset" hides the reason one level down.
        reason = error.__cause__ or error
        detail = " ".join(str(reason).split())
        raise UserError(f"{source}: {what}: {type(reason).__name__}: {detail}") from error

    if isinstance(data, datasets.DatasetDict):
        if len(data) != 1:
            raise UserError(
                f"{source}: has the splits {', '.join(data)}; set split to one of them."
            )
        split, data = next(iter(data.items()))
    which = f"[{split}]" if split else ""
    for number, row in enumerate(data):
        yield _Row(row, f"{label}{which}:{number}", f"{source}{which}:{number}")


def _understand(row: _Row) -> Example:
    """The example in a row. Raises BadRow."""
    fields = parse_line(row.raw) if isinstance(row.raw, bytes) else row.raw
    fields = {key: value for key, value in fields.items() if value is not None}
    messages, text = understand(fields)
    prompt = None
    if messages and [m["role"] for m in messages] in (["user"], ["user", "assistant"]):
        prompt = messages[0]["content"]
    kind = next((string(fields, name) for name in ("kind", "task") if name in fields), None)
    label = fields.get("id", row.label)
    if isinstance(label, bool) or not isinstance(label, str | int) or label == "":
        raise BadRow("wrong type", f"id is {short(label)}; expected text or a whole number")
    return Example(clean(str(label), "id"), messages, prompt, text, kind, row.source)
