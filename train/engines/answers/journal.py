"""The answers of a part that is not whole yet: a line per answer, written as it comes."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from decode.base.errors import UserError
from train.engines.answers.protocols import Answer

PREFIX = "open-"


class Journal:
    """The open answers of part `part`, a directory that does not exist yet. A process that is
    killed loses no answer: its successor reads the file."""

    def __init__(self, part: Path) -> None:
        self.path = part.with_name(f"{PREFIX}{part.name}.jsonl")

    def read(self, rows: Mapping[int, str]) -> dict[int, Answer]:
        """The answers so far by row number. rows: the key of each row. Raises UserError as
        `entries`."""
        # Earlier versions wrote no keys.
        return {
            row: answer
            for row, key, answer in self.entries()
            if row in rows and key in ("", rows[row])
        }

    def entries(self) -> list[tuple[int, str, Answer]]:
        """The number, the key and the answer of each row so far. Raises UserError for a line that
        is damaged; a last line that a kill cut short is removed."""
        if not self.path.exists():
            return []
        text = self.path.read_bytes()
        complete, _, cut = text.rpartition(b"\n")
        if cut:
            self.path.write_bytes(complete + b"\n" if complete else b"")
        found = []
        for place, line in enumerate(complete.splitlines(), 1):
            try:
                entry = json.loads(line)
                entry.pop("top_k", None)  # Earlier versions kept log-probabilities
                found.append((entry.pop("row"), entry.pop("key", ""), Answer(**entry)))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise UserError(
                    f"{self.path}:{place} is damaged ({error}); delete this line, and its answer "
                    "is asked for again"
                ) from error
        return found

    def add(self, row: int, answer: Answer, key: str) -> None:
        """Append an answer, completely or not at all. key: the key of the row. Raises UserError if
        the file cannot be written."""
        rest = json.dumps({"row": row, "key": key} | asdict(answer)).encode() + b"\n"
        try:
            # Opened each time: many parts may be open, and a kill leaves nothing in a buffer.
            with open(self.path, "ab", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                try:
                    while rest:
                        rest = rest[file.write(rest) :]
                except OSError:
                    file.truncate(size)  # else the next answer would go on in a line cut short
                    raise
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from error

    def remove(self) -> None:
        """Delete the file: the part is whole."""
        self.path.unlink(missing_ok=True)


def open_journals(directory: Path) -> list[Journal]:
    """The journals of a generate stage."""
    names = (path.stem.removeprefix(PREFIX) for path in directory.glob(f"{PREFIX}*.jsonl"))
    return [Journal(directory / name) for name in sorted(names)]
