"""On-disk caches of the target's outputs. A cache has numbered parts with tensors of some samples.

Each part is written completely or not at all. It stores a description of its target and a hash of
every text, so it cannot be used for another target or text. After a kill, the writer continues with
the next part.

Caches may have terabytes, so opening one hashes only the small files, and compares the sizes of the
others. `check_parts` hashes the tensors. `checked.json` notes the size and the time of each file
that was hashed, so a file is hashed again only after it changed.

`distill.teacher.top_k_cache` (log-probabilities) and `distill.teacher.cached_features` (hidden
states) define the tensors.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from decode.base.artifact import (
    MANIFEST,
    link_directory,
    verify_directory,
    write_directory,
    write_file,
)
from decode.base.errors import UserError
from distill.teacher.cache_directory import PART, part_directories, parts_of
from distill.teacher.read_ahead import ReadAhead

FILE = "cache.safetensors"
ROWS = "samples.json"
CHECKED = "checked.json"
BYTES = "bytes-"  # before a hash of tokens as bytes
# A sample's id, its tokens, and which of them are predicted.
Text = tuple[str, Sequence[int], Sequence[bool]]


def text_sha256(tokens: Sequence[int], mask: Sequence[bool]) -> str:
    """Return a hash of one sample: its tokens, and which of them are predicted. Arrays of int32 and
    bool are hashed as they are."""
    digest = hashlib.sha256(np.ascontiguousarray(tokens, np.int32).tobytes())
    digest.update(np.ascontiguousarray(mask, bool).tobytes())
    return BYTES + digest.hexdigest()[:32]


def _is_hash_of(stored: str, tokens: Sequence[int], mask: Sequence[bool]) -> bool:
    if stored.startswith(BYTES):
        return stored == text_sha256(tokens, mask)
    # Caches of earlier versions have a hash of JSON, which takes a hundred times as long.
    body = json.dumps([np.asarray(tokens).tolist(), np.asarray(mask, int).tolist()])
    return stored == hashlib.sha256(body.encode()).hexdigest()[:32]


def write_part(
    directory: Path,
    number: int,
    samples: Sequence[tuple[str, str]],
    tensors: Mapping[str, Sequence[Tensor]],
    meta: dict[str, Any],
) -> None:
    """Write one part.

    samples: (id, text_sha256) of each sample. tensors: by name, one tensor per sample, in the dtype
    to store. All tensors of one sample have the same first dimension.
    """

    def fill(path: Path) -> None:
        joined = {name: torch.cat(list(x)).cpu().contiguous() for name, x in tensors.items()}
        save_file(joined, path / FILE)
        lengths = [len(x) for x in next(iter(tensors.values()))]
        rows = [
            {"id": name, "text": text, "tokens": length}
            for (name, text), length in zip(samples, lengths, strict=True)
        ]
        (path / ROWS).write_text(json.dumps(rows), encoding="utf-8")

    write_directory(directory / f"{PART}-{number}", fill, meta=meta)


def _rows(part: Path) -> list[dict[str, Any]]:
    """The samples of a part, in order: {"id", "text", "tokens"}."""
    rows: list[dict[str, Any]] = json.loads((part / ROWS).read_text(encoding="utf-8"))
    return rows


def held(part: Path) -> set[tuple[str, str]]:
    """The id of each sample of a part, with the hash of its text. Raises CorruptArtifact for a
    damaged list of samples."""
    verify_directory(part, deep=[ROWS])
    return {(row["id"], row["text"]) for row in _rows(part)}


def lacking(parts: Iterable[Path], texts: Iterable[Text]) -> list[int]:
    """The numbers of the texts that these parts do not hold."""
    known = dict(pair for part in parts for pair in held(part))
    return [
        number
        for number, (name, tokens, mask) in enumerate(texts)
        if name not in known or not _is_hash_of(known[name], tokens, mask)
    ]


def take_parts(directory: Path, others: Sequence[Path], texts: Iterable[Text]) -> None:
    """Let those of the complete parts `others` be parts of this cache, too, which hold a text that
    it lacks. texts: those that it should hold."""
    parts = parts_of(directory)
    wanted = {(name, text_sha256(tokens, mask)) for name, tokens, mask in texts} if others else ()
    missing = set(wanted).difference(*map(held, parts))
    numbers = free_numbers(parts)
    for other in others:
        if missing & held(other):
            link_directory(other, directory / f"{PART}-{next(numbers)}")


def free_numbers(parts: Sequence[Path]) -> Iterator[int]:
    """The numbers that none of these parts has, in ascending order."""
    taken = {part.name for part in parts}
    return (number for number in count() if f"{PART}-{number}" not in taken)


def check_parts(parts: Sequence[Path], *, again: bool = False) -> int:
    """Hash the tensors of the parts of one cache that changed since they were last hashed. Returns
    the number of hashed parts.

    again: hash all of them. Raises CorruptArtifact for the first damaged part.
    """
    noted = {} if again or not parts else _checked(parts[0].parent)
    changed = [part for part in parts if again or noted.get(part.name) != _stamp(part)]
    for part in changed:
        verify_directory(part)
    return len(changed)


def note_checked(directory: Path, what: str) -> None:
    """Note in `checked.json` that all parts of a cache were hashed as they are now. A directory
    that cannot be written stays without the note; its parts are then hashed at each check."""
    stamps = {part.name: _stamp(part) for part in part_directories(directory, what)}
    if stamps != _checked(directory):
        with suppress(UserError):
            write_file(directory / CHECKED, json.dumps(stamps))


def _stamp(part: Path) -> list[int] | None:
    """The size and the time of a part's tensors. None if there is no such file."""
    try:
        status = (part / FILE).stat()
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns]


def _checked(directory: Path) -> dict[str, Any]:
    try:
        noted = json.loads((directory / CHECKED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}


class CachedOutputs(ABC):
    """Reads the parts of a cache. It loads only the requested tensors.

    metas: the metadata of each part, by its directory. samples: the ids of all stored samples.
    index_sha256: a hash of the names of the parts and of their manifests, which list the hash of
    every file.

    what: a name for the content of the directory, for messages. Raises UserError if the directory
    has no part, or if a part lacks a file, has one of another size, or has a damaged list of
    samples. Tensors are not hashed here; `check_parts` does this.
    """

    def __init__(self, directory: Path, what: str) -> None:
        self.directory, self.what = directory, what
        parts = part_directories(directory, what)
        self.metas = {part: verify_directory(part, deep=[ROWS]) for part in parts}
        digest = hashlib.sha256()
        # By sample id: the file, the first row and the end in it, and the hash of the text.
        self._rows: dict[str, tuple[Path, int, int, str]] = {}
        for part in parts:
            digest.update(part.name.encode() + (part / MANIFEST).read_bytes())
            begin = 0
            for row in _rows(part):
                end = begin + row["tokens"]
                self._rows[row["id"]] = (part / FILE, begin, end, row["text"])
                begin = end
        self.index_sha256 = digest.hexdigest()
        self._ahead = ReadAhead(self.read_batch)

    @abstractmethod
    def read_batch(self, ids: Sequence[str]) -> dict[Any, Tensor]:
        """The tensors of a batch of samples, by name or by number, on the CPU."""

    def expect(self, batches: Sequence[Sequence[str]]) -> None:
        """Read these batches of samples in the background (`ReadAhead.expect`)."""
        self._ahead.expect(batches)

    def kinds(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """The parts whose metadata differ from those of all parts before them. A check of the
        metadata needs no other part."""
        seen = set()
        for part, meta in self.metas.items():
            text = json.dumps(meta, sort_keys=True)
            if text not in seen:
                seen.add(text)
                yield part, meta

    @property
    def samples(self) -> Iterable[str]:
        return self._rows

    def require(self, samples: Iterable[Text]) -> None:
        """Raise UserError unless the parts hold every sample with its text."""
        for name, tokens, mask in samples:
            if name not in self._rows:
                raise UserError(
                    f"the {self.what} {self.directory} has no sample {name!r}; it was made from "
                    "other data. Make the cache again from this text."
                )
            if not _is_hash_of(self._rows[name][3], tokens, mask):
                raise UserError(
                    f"the text of sample {name!r} is not the text that the {self.what} "
                    f"{self.directory} was made from. Make the cache again from this text."
                )

    def read(self, sample: str, names: Sequence[str]) -> list[Tensor]:
        """Return the tensors with these names for a sample.

        Raises KeyError for a sample that is not stored; check with `require` first. Raises
        UserError if the file cannot be read.
        """
        file, begin, end, _ = self._rows[sample]
        try:
            with safe_open(file, "pt") as stored:
                return [stored.get_slice(name)[begin:end] for name in names]
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{file}, a part of the {self.what}, cannot be read: {error}. Restore it, or "
                "delete its directory and make the cache again"
            ) from error
