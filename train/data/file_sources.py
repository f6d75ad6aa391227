"""Files that are read here, row by row: lines of JSON, JSON arrays, and paragraphs of text.

A source yields its rows in order, each with its number. Other readers give all rows of a column one
type, and rewrite what does not fit: texts that look like dates, lists among texts.
"""

import codecs
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from decode.base.errors import UserError, nearest
from train.data.row_kinds import FIELDS, short

PACKED = (".gz", ".bz2", ".xz", ".zst")  # of a compressed file, behind its type
# At the start of a file. That of UTF-32 begins with UTF-16's, or with a 0.
MARK = codecs.BOM_UTF8
OTHER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)

Raw = bytes | dict[str, Any]  # a row before parsing: a line of JSON, or its fields


class RowSource(ABC):
    """A source of rows. name: as the user wrote it, for messages. label: for ids. names_ids: the
    ids that its rows have begin with the label."""

    names_ids = False

    def __init__(self, name: str, label: str) -> None:
        self.name, self.label = name, label

    @abstractmethod
    def rows(self) -> Iterator[tuple[int, Raw]]:
        """All rows in order, each with the number that names it in ids and messages. Raises
        UserError if the source cannot be read."""

    @property
    @abstractmethod
    def stamp(self) -> list[Any]:
        """JSON values that are others when the rows may be others."""


def no_such_file(name: str, path: Path) -> UserError:
    """The error for a file that is missing, with the nearest name beside it."""
    beside = [p.name for p in path.parent.glob("*")] if path.parent.is_dir() else []
    return UserError(
        f"{name}: no such file (looked at {path.absolute()}).{nearest(path.name, beside)}"
    )


class FileSource(RowSource):
    def __init__(self, name: str, label: str, path: Path) -> None:
        super().__init__(name, label)
        self.path = path

    def rows(self) -> Iterator[tuple[int, Raw]]:
        try:
            with opened(self.path, self.name) as file:
                yield from self._scan(file)
        except FileNotFoundError:
            raise no_such_file(self.name, self.path) from None
        except OSError as error:
            raise UserError(
                f"{self.name}: cannot be read: {error.strerror} ({self.path})"
            ) from error

    @abstractmethod
    def _scan(self, file: BinaryIO) -> Iterator[tuple[int, Raw]]: ...

    @property
    def stamp(self) -> list[Any]:
        return file_stamp(self.path)


class Lines(FileSource):
    """One JSON object per line, numbered from 1. Blank lines are not rows."""

    def _scan(self, file: BinaryIO) -> Iterator[tuple[int, Raw]]:
        for number, line in _lines(file, self.name):
            if line.strip():
                yield number, line


class Paragraphs(FileSource):
    """The parts between blank lines, numbered by their first line, from 1."""

    def _scan(self, file: BinaryIO) -> Iterator[tuple[int, Raw]]:
        first = 0
        lines: list[bytes] = []
        for number, line in _lines(file, self.name):
            try:
                blank = not line.decode().strip()
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{self.name}:{number}: byte 0x{line[error.start]:02x} is not UTF-8; expected "
                    "UTF-8 text"
                ) from error
            if not blank:
                if not lines:
                    first = number
                lines.append(line)
            elif lines:
                yield first, _paragraph(lines)
                lines = []
        if lines:
            yield first, _paragraph(lines)


def _paragraph(lines: list[bytes]) -> Raw:
    return {"text": b"".join(lines).decode().strip()}


class Array(FileSource):
    """The objects of a JSON array, numbered from 0. The array may be the only list of an object.
    A file with one object per line is read too, numbered by lines, from 1. All rows are in memory.
    field: of an object, the one with the rows; None: its only list."""

    def __init__(self, name: str, label: str, path: Path, field: str | None = None) -> None:
        super().__init__(name, label, path)
        self._field = field

    def _scan(self, file: BinaryIO) -> Iterator[tuple[int, Raw]]:
        yield from self._parsed(_without_mark(file.read(), self.name))

    def _parsed(self, content: bytes) -> list[tuple[int, Raw]]:
        try:
            value = json.loads(content.decode())  # of bytes, other codes than UTF-8 are read too
        except (ValueError, RecursionError) as error:
            lines = [entry for entry in _lines(io.BytesIO(content), self.name) if entry[1].strip()]
            if len(lines) < 2 or not lines[0][1].lstrip().startswith(b"{"):
                raise UserError(
                    f"{self.name}: broken JSON ({error}); expected an array of objects, or one "
                    "object per line"
                ) from error
            return [*lines]
        if self._field is not None:
            value = value.get(self._field) if isinstance(value, dict) else None
        elif isinstance(value, dict) and not any(name in value for name in FIELDS):
            lists = [entry for entry in value.values() if isinstance(entry, list)]
            value = lists[0] if len(lists) == 1 else value
        rows: Iterable[tuple[int, Any]] = (
            enumerate(value) if isinstance(value, list) else [(1, value)]
        )
        return [
            (number, entry if isinstance(entry, dict) else json.dumps(entry).encode())
            for number, entry in rows
        ]


def file_type(name: str) -> str:
    """The type of a file by its name, such as .jsonl, also if it is compressed."""
    path = PurePath(name.lower())
    return PurePath(path.stem).suffix if path.suffix in PACKED else path.suffix


@contextmanager
def opened(path: Path, name: str) -> Iterator[BinaryIO]:
    """The content of a file, which may be compressed. name: for messages. Raises UserError for a
    damaged file, and for a compression without its package."""
    if path.suffix.lower() not in PACKED:
        with path.open("rb") as file:
            yield file
        return
    from fsspec.compression import compr  # type: ignore[import-untyped]
    from fsspec.utils import infer_compression  # type: ignore[import-untyped]

    unpacked = compr.get(infer_compression(path.name))
    if unpacked is None:
        raise UserError(
            f"{name}: reading {path.suffix} needs a package that is not installed (zstandard); "
            "install it, or unpack the file"
        )
    with path.open("rb") as packed:
        try:
            with unpacked(packed, mode="rb") as file:
                yield file
        except UserError:
            raise
        except Exception as error:  # each compression has its own
            raise UserError(f"{name}: cannot be unpacked: {error}. Make the file again") from error


def file_stamp(path: Path) -> list[Any]:
    """The place, size and time of a file. The size and time of none are 0: reading it says more."""
    try:
        status = path.stat()
    except OSError:
        return [str(path.absolute()), 0, 0]
    return [str(path.absolute()), status.st_size, status.st_mtime_ns]


def first_words(path: Path) -> str:
    """What the first line of a file begins with, for a message."""
    with path.open("rb") as file:
        line = file.readline(200).decode(errors="replace").strip()
    return short(line) if line.replace("\t", "").isprintable() else "bytes that are no text"


def _lines(file: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """The number of each line, from 1, and the line. name: of the file, for messages."""
    for number, line in enumerate(file, start=1):
        yield number, _without_mark(line, name) if number == 1 else line


def _without_mark(start: bytes, name: str) -> bytes:
    """Raises UserError for a mark of another code than UTF-8."""
    if start.startswith(OTHER_MARKS):
        raise UserError(f"{name}: is UTF-16 or UTF-32; expected UTF-8. Save the file as UTF-8")
    return start.removeprefix(MARK)
