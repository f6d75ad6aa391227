"""Where rows are read from: files of lines or paragraphs, JSON arrays, and data sets.

A source yields its rows in order, each with its place, and reads any row again from its place. So a
text may have millions of rows: what stays in memory are their places.
"""

import io
import json
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from decode.base.errors import UserError, nearest
from train.data.row_kinds import EXPECTED, FIELDS, READ, short

# The builder of `datasets` for each type of file. This module reads the other types itself: in a
# table of Arrow, all rows of a column have one type, and contents of messages have several.
BUILDERS = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
LINES = (".jsonl", ".ndjson")
ARRAY, PARAGRAPHS = ".json", ".txt"
OWN_TYPES = (*LINES, ARRAY, PARAGRAPHS)
MARK = b"\xef\xbb\xbf"  # of UTF-8, at the start of a file

Raw = bytes | dict[str, Any]  # a row before parsing: a line of JSON, or its fields


class Place(NamedTuple):
    """Where a row is. number: names it in ids and messages. start, size: the bytes in a file; for
    other sources, start is the row's index and size is 0."""

    number: int
    start: int
    size: int


def name_and_split(source: str, base_dir: Path = Path()) -> tuple[str, str | None]:
    """The name of a source, and the split that is named behind its last @; None if there is none.
    A path that exists has no split, and a split has no slash: directories may have an @."""
    name, _, split = source.rpartition("@")
    if not name or not split or "/" in split or (base_dir / Path(source).expanduser()).exists():
        return source, None
    return name, split


class Source(ABC):
    """A source of rows. name: as the user wrote it, for messages. label: for ids. names_ids: the
    ids that its rows have begin with the label. sparse: it is a table, see
    `train.data.row_kinds.understand`."""

    sparse = names_ids = False

    def __init__(self, name: str, label: str) -> None:
        self.name, self.label = name, label

    @abstractmethod
    def rows(self) -> Iterator[tuple[Place, Raw]]:
        """All rows in order. Raises UserError if the source cannot be read."""

    @abstractmethod
    @contextmanager
    def opened(self) -> Iterator[Callable[[int, int], Raw]]:
        """What reads a row again from its start and size. Only after `rows`. Raises UserError if
        the source changed since then."""
        yield lambda start, size: b""


def sources_of(names: list[str], base_dir: Path, name_ids: bool = False) -> Iterator[Source]:
    """The sources with these names, which may end in @SPLIT. Relative paths start at `base_dir`.
    name_ids: see `Source`. Raises UserError for a source that is named twice, for a split of a file
    that has none, and for a type of files that is not read."""
    places = []
    for written in names:
        name, split = name_and_split(written, base_dir)
        places.append((written, name, base_dir / Path(name).expanduser(), split))
    files = Counter(path.name for _, _, path, _ in places)
    seen: set[tuple[Path, str | None]] = set()
    for written, name, path, split in places:
        if (path.resolve(), split) in seen:
            raise UserError(
                f"{written} is named twice; expected each source once. To train on its rows more "
                "often, raise loop.epochs"
            )
        seen.add((path.resolve(), split))
        # With the bare file name, ids stay the same when the data moves. Files with equal names
        # need their paths as well.
        label = path.name if path.exists() and files[path.name] == 1 else name
        if path.is_file() and path.suffix not in (*OWN_TYPES, *BUILDERS):
            raise UserError(
                f'{name}: cannot read files ending in "{path.suffix}" (this one begins with '
                f"{_first_words(path)}); expected {', '.join([*OWN_TYPES, *BUILDERS])} or a "
                f"directory. Make it a .csv with a header, or a .jsonl file with a line such as "
                f"{EXPECTED}"
            )
        if path.suffix not in OWN_TYPES or path.is_dir():
            source: Source = _DataSet(name, label, path, split)
        elif split is not None:
            raise UserError(
                f'{written}: names the split "{split}", but a {path.suffix} file has no splits. '
                f"Leave @{split} out, or name the file of that split."
            )
        else:
            kind = {ARRAY: _Array, PARAGRAPHS: _Paragraphs}.get(path.suffix, _Lines)
            source = kind(name, label, path)
        source.names_ids = name_ids
        yield source


class _File(Source):
    def __init__(self, name: str, label: str, path: Path) -> None:
        super().__init__(name, label)
        self.path = path
        self._stamp: tuple[int, int] | None = None

    def rows(self) -> Iterator[tuple[Place, Raw]]:
        try:
            with self.path.open("rb") as file:
                self._stamp = _stamp(file)
                yield from self._scan(file)
        except FileNotFoundError:
            folder = self.path.parent
            beside = [p.name for p in folder.glob("*")] if folder.is_dir() else []
            raise UserError(
                f"{self.name}: no such file (looked at {self.path.absolute()})."
                f"{nearest(self.path.name, beside)}"
            ) from None
        except OSError as error:
            raise UserError(
                f"{self.name}: cannot be read: {error.strerror} ({self.path})"
            ) from error

    @abstractmethod
    def _scan(self, file: BinaryIO) -> Iterator[tuple[Place, Raw]]: ...

    @contextmanager
    def opened(self) -> Iterator[Callable[[int, int], Raw]]:
        try:
            file = self.path.open("rb", buffering=0)
        except OSError as error:
            raise changed(self.name) from error
        with file:
            if _stamp(file) != self._stamp:
                raise changed(self.name)

            def read(start: int, size: int) -> Raw:
                file.seek(start)
                return self._row(file.read(size))

            yield read

    def _row(self, raw: bytes) -> Raw:
        return raw


class _Lines(_File):
    """One JSON object per line, numbered from 1. Blank lines are not rows."""

    def _scan(self, file: BinaryIO) -> Iterator[tuple[Place, Raw]]:
        for number, start, line in _lines(file):
            if line.strip():
                yield Place(number, start, len(line)), line


class _Paragraphs(_File):
    """The parts between blank lines, numbered by their first line, from 1."""

    def _scan(self, file: BinaryIO) -> Iterator[tuple[Place, Raw]]:
        first = begin = 0
        lines: list[bytes] = []
        for number, start, line in _lines(file):
            try:
                blank = not line.decode().strip()
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{self.name}:{number}: byte 0x{line[error.start]:02x} is not UTF-8; expected "
                    "UTF-8 text"
                ) from error
            if not blank:
                if not lines:
                    first, begin = number, start
                lines.append(line)
            elif lines:
                yield self._paragraph(first, begin, lines)
                lines = []
        if lines:
            yield self._paragraph(first, begin, lines)

    def _paragraph(self, number: int, start: int, lines: list[bytes]) -> tuple[Place, Raw]:
        raw = b"".join(lines)
        return Place(number, start, len(raw)), self._row(raw)

    def _row(self, raw: bytes) -> Raw:
        return {"text": raw.decode().strip()}


class _Array(_File):
    """The objects of a JSON array, numbered from 0. The array may be the only list of an object,
    and a file with one object per line is read too. All rows are in memory."""

    def _scan(self, file: BinaryIO) -> Iterator[tuple[Place, Raw]]:
        self._values = self._parsed(file.read().removeprefix(MARK))
        for index, (number, value) in enumerate(self._values):
            yield Place(number, index, 0), value

    def _parsed(self, content: bytes) -> list[tuple[int, Raw]]:
        try:
            value = json.loads(content)
        except (ValueError, RecursionError) as error:
            lines = [(n - 1, line) for n, _, line in _lines(io.BytesIO(content)) if line.strip()]
            if len(lines) < 2 or not lines[0][1].lstrip().startswith(b"{"):
                raise UserError(
                    f"{self.name}: broken JSON ({error}); expected an array of objects, or one "
                    "object per line"
                ) from error
            return [*lines]
        if isinstance(value, dict) and not any(name in value for name in FIELDS):
            lists = [entry for entry in value.values() if isinstance(entry, list)]
            value = lists[0] if len(lists) == 1 else [value]
        return [
            (number, entry if isinstance(entry, dict) else json.dumps(entry).encode())
            for number, entry in enumerate(value if isinstance(value, list) else [value])
        ]

    @contextmanager
    def opened(self) -> Iterator[Callable[[int, int], Raw]]:
        yield lambda start, size: self._values[start][1]


class _DataSet(Source):
    """What `datasets` reads: a table or a directory, or a data set of the hub. It maps its Arrow
    files into memory."""

    sparse = True

    def __init__(self, name: str, label: str, path: Path, split: str | None) -> None:
        super().__init__(name, label)
        self._path, self._split = path, split

    def rows(self) -> Iterator[tuple[Place, Raw]]:
        self._data, split = _load(self._path, self.name, self._split)
        which = f"[{split}]" if split else ""
        self.name, self.label = self.name + which, self.label + which
        with _named(self.name, "has a row that cannot be read"):
            for number, row in enumerate(self._data):
                yield Place(number, number, 0), row

    @contextmanager
    def opened(self) -> Iterator[Callable[[int, int], Raw]]:
        yield lambda start, size: self._data[start]


def changed(name: str) -> UserError:
    """The error for a source that is not what it was."""
    return UserError(
        f"{name}: the file changed since it was read; expected the same rows for all of the run. "
        "Restore it, or start a run with another name"
    )


def _stamp(file: Any) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _first_words(path: Path) -> str:
    """What the first line of a file begins with, for a message."""
    with path.open("rb") as file:
        line = file.readline(200).decode(errors="replace").strip()
    return short(line) if line.replace("\t", "").isprintable() else "bytes that are no text"


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """The number of each line, from 1, its first byte in the file, and the line."""
    start = 0
    for number, line in enumerate(file, start=1):
        size = len(line)
        text = line.removeprefix(MARK) if number == 1 else line
        yield number, start + size - len(text), text
        start += size


def _load(path: Path, source: str, split: str | None) -> tuple[Any, str | None]:
    """The data set, and the name of its split."""
    # Imported here because the import takes a second, which other files do not need.
    import datasets

    if not path.exists() and (path.suffix in BUILDERS or source.startswith((".", "/", "~"))):
        raise UserError(f"{source}: no such file or directory (looked at {path.absolute()}).")
    what = f"neither a file ({path.absolute()}) nor a data set that could be loaded"
    with _named(source, "cannot be read" if path.exists() else what):
        if any((path / marker).is_file() for marker in ("state.json", "dataset_dict.json")):
            data = datasets.load_from_disk(str(path))
        elif path.is_file():
            data = _built(BUILDERS[path.suffix], split or "train", data_files=str(path))
        else:
            data = _built(str(path) if path.is_dir() else source, split)
    if isinstance(data, datasets.DatasetDict):
        if split is None and len(data) == 1:
            (split,) = data
        if split not in data:
            found = f'no split "{split}"' if split else "no split is named"
            raise UserError(
                f"{source}: {found}; expected one of {', '.join(data)}. Write {source}@SPLIT."
                f"{nearest(split or '', data)}"
            )
        data = data[split]
    # Other columns may be large, or media that take long to decode.
    used = [name for name in data.column_names if name in READ] or data.column_names
    data = data.with_format(None).select_columns(used)
    for name in used:
        if getattr(data.features[name], "decode", False):
            data = data.cast_column(name, replace(data.features[name], decode=False))
    return data, split


def _built(name: str, split: str | None, **options: Any) -> Any:
    """A data set that its builder reads. A table of text (.csv) gives text, and words such as NA
    and None are text."""
    import pandas  # type: ignore[import-untyped]
    from datasets import Features, Value, load_dataset_builder
    from datasets.packaged_modules.csv.csv import CsvConfig

    builder = load_dataset_builder(name, **options)
    if isinstance(builder.config, CsvConfig) and builder.config.features is None:
        files = next(iter((builder.config.data_files or {}).values()))
        columns = pandas.read_csv(files[0], nrows=0).columns
        text = Features(dict.fromkeys(columns, Value("string")))
        options |= {"features": text, "keep_default_na": False, "na_values": [""]}
        builder = load_dataset_builder(name, **options)
    builder.download_and_prepare()
    return builder.as_dataset(split=split)


@contextmanager
def _named(source: str, what: str) -> Iterator[None]:
    """Turns an error of `datasets` into a UserError. what: is wrong with the source.

    Its errors have no common base class, and differ by version. The user must mend any of them.
    """
    try:
        yield
    except Exception as error:
        # "An error occurred while generating the dataset" hides the reason one level down.
        reason = error.__cause__ or error
        detail = " ".join(str(reason).split())
        raise UserError(f"{source}: {what}: {type(reason).__name__}: {detail}") from error
