"""Reads prompts, conversations and texts, and counts every row.

A row is one JSON object (one line of a .jsonl file, or one row of a data set). The first of these
fields that is present and not null sets the type of the row:

    messages   [{"role": "user", "content": "..."}, ...]     a conversation, one or more turns
    prompt     "..."        a user message; `response` or `reference` adds the assistant's answer
    text       "..."        plain text to train on

Optional: `id` (text or a whole number, unique), `kind` or `task` (a label for reports). Other
fields are ignored, so hub data sets can be used unchanged.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from decode.errors import UserError, nearest

ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = ("messages", "prompt", "text")
# The builder of `datasets` for each type of file. This module reads .jsonl itself, line by line.
BUILDERS = {".json": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
LINES = (".jsonl", ".ndjson")
PROBLEMS_SHOWN = 20


@dataclass(frozen=True)
class Example:
    """One row that was read.

    `messages` is set for `messages` and `prompt` rows, `text` for `text` rows. `prompt` is the
    user's text alone, for a tokenizer without a chat template; it is set if the conversation is one
    user message, answered or not. `source` is "file:line" (or "data set[split]:row").
    """

    id: str
    messages: tuple[dict[str, str], ...] | None
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


class _BadRow(Exception):
    """A row that cannot be used. reason: the key for counting it."""

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason
        self.problem = problem


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

    A source is a .jsonl file, a file or directory that `datasets` reads (json, parquet, csv,
    arrow, `save_to_disk`), or the name of a data set on the hub. Relative paths start at
    `base_dir`. `split` picks the split of a data set; .jsonl files have none.

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
        except _BadRow as bad:
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
            f"Expected at least one row with {' or '.join(FIELDS)}."
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
        if path.suffix in LINES and not path.is_dir():
            if split is not None:
                raise UserError(
                    f'{source}: split "{split}" is set, but a {path.suffix} file has no splits. '
                    f"Leave split out, or name the file of that split."
                )
            yield from _lines(path, source, label)
        else:
            yield from _data_set_rows(path, source, label, split)


def _lines(path: Path, source: str, label: str) -> Iterator[_Row]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    yield _Row(line, f"{label}:{number}", f"{source}:{number}")
    except FileNotFoundError:
        beside = [p.name for p in path.parent.glob("*")] if path.parent.is_dir() else []
        raise UserError(
            f"{source}: no such file (looked at {path.absolute()}).{nearest(path.name, beside)}"
        ) from None
    except OSError as error:
        raise UserError(f"{source}: cannot be read: {error.strerror} ({path})") from error


def _data_set_rows(path: Path, source: str, label: str, split: str | None) -> Iterator[_Row]:
    # Imported here because the import takes a second, which .jsonl files do not need.
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
                    f"{', '.join([*LINES, *BUILDERS])} or a directory."
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
    """The example in a row. Raises _BadRow. Checks only structure and types, not the content."""
    fields = _parse(row.raw) if isinstance(row.raw, bytes) else row.raw
    # A data set has null if a row lacks a column that other rows have.
    fields = {key: value for key, value in fields.items() if value is not None}
    present = next((name for name in FIELDS if name in fields), None)
    if present is None:
        hint = next((f" ({name.strip()})" for key in fields if (name := nearest(key, FIELDS))), "")
        raise _BadRow(
            "no known field",
            f"found {', '.join(map(_short, fields)) or 'no fields'}; "
            f"expected {', '.join(FIELDS[:-1])} or {FIELDS[-1]}{hint}",
        )
    messages: tuple[dict[str, str], ...] | None = None
    prompt = text = None
    if present == "text":
        text = _string(fields, "text")
    elif present == "messages":
        messages = _conversation(fields["messages"])
    else:
        messages = ({"role": "user", "content": _string(fields, "prompt")},)
        answer = next((name for name in ("response", "reference") if name in fields), None)
        if answer is not None:
            messages += ({"role": "assistant", "content": _string(fields, answer)},)
    if messages and [m["role"] for m in messages] in (["user"], ["user", "assistant"]):
        prompt = messages[0]["content"]

    kind = next((_string(fields, name) for name in ("kind", "task") if name in fields), None)
    label = fields.get("id", row.label)
    if isinstance(label, bool) or not isinstance(label, str | int) or label == "":
        raise _BadRow("wrong type", f"id is {_short(label)}; expected text or a whole number")
    return Example(_clean(str(label), "id"), messages, prompt, text, kind, row.source)


def _parse(line: bytes) -> dict[str, Any]:
    try:
        decoded = line.decode()
    except UnicodeDecodeError as error:
        raise _BadRow(
            "not UTF-8",
            f"byte 0x{line[error.start]:02x} at column {error.start + 1} is not UTF-8; "
            f"expected a line of UTF-8 text",
        ) from error
    try:
        value = json.loads(decoded)
    # RecursionError: brackets nested thousands deep.
    except (ValueError, RecursionError) as error:
        raise _BadRow("broken JSON", f"broken JSON ({error}); expected one JSON object") from error
    if not isinstance(value, dict):
        raise _BadRow("broken JSON", f"found {_short(value)}; expected one JSON object")
    return value


def _conversation(value: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise _BadRow(
            "wrong type", f"messages is {_short(value)}; expected a list of role and content"
        )
    messages = []
    for position, message in enumerate(value):
        name = f"messages[{position}]"
        if not isinstance(message, dict):
            raise _BadRow(
                "wrong type", f"{name} is {_short(message)}; expected an object of role and content"
            )
        present = {key: text for key, text in message.items() if text is not None}
        for key in ("role", "content"):
            if key not in present:
                raise _BadRow(
                    "wrong type",
                    f"{name} has {', '.join(map(_short, present)) or 'no fields'}; "
                    f"expected role and content",
                )
        if present["role"] not in ROLES:
            raise _BadRow(
                "wrong type",
                f"{name} has the role {_short(present['role'])}; expected {', '.join(ROLES)}",
            )
        # Only user and assistant need non-empty content: an empty system message is harmless.
        speaks = present["role"] in ("user", "assistant")
        messages.append(
            {
                key: _string(present, key, f"{name}.{key}", empty=key != "content" or not speaks)
                for key in present
            }
        )
    if messages[0]["role"] == "assistant" or all(m["role"] != "user" for m in messages):
        raise _BadRow(
            "no user message",
            f"the roles are {', '.join(m['role'] for m in messages)}; "
            f"expected a user message for the assistant to answer",
        )
    return tuple(messages)


def _string(fields: dict[str, Any], key: str, name: str | None = None, empty: bool = False) -> str:
    value = fields[key]
    name = name or key
    if not isinstance(value, str):
        raise _BadRow("wrong type", f"{name} is {_short(value)}; expected text")
    if not empty and not value.strip():
        raise _BadRow(f"empty {key}", f"{name} is empty; expected text")
    return _clean(value, name)


def _clean(value: str, name: str) -> str:
    """Refuse a lone surrogate: JSON can contain half a surrogate pair, but no tokenizer can encode
    it."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _BadRow(
            "not UTF-8",
            f"{name} contains the lone surrogate \\u{ord(value[error.start]):04x}; expected text",
        ) from error
    return value


def _short(value: Any) -> str:
    """A value's JSON, cut to a readable length for a message."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."
