"""The records of one tenant: a journal of JSON lines in a directory of their own.

    DIR/TENANT/records-TIME.jsonl    segments; TIME: when a segment began, in ms, 16 digits

Directories and files are open to their owner alone.

A record is a row that `train.data.read` takes as training data:

    id         unique
    time       seconds since 1970
    model      as the engine names it
    request    the id of the answer, as the client saw it
    user       SHA-256 of the request's `user` or `safety_identifier`; null: it named none
    messages   the conversation with the answer as its last message
    redacted   how many parts were taken out: {"prompt": {kind: n}, "answer": {kind: n}}

Every change of the files holds the tenant's lock, so that several processes may append, forget and
read. A kill in the middle of a line leaves a torn line. Readers skip it, and the next append cuts
it off.
"""

import hashlib
import json
import os
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.base.artifact import write_file
from decode.base.errors import UserError
from draftsmith.learn.record.kept_answers import Exchange
from draftsmith.learn.record.redaction import redact
from train.base.file_lock import lock_file

TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DAY = 86_400.0
# In a version of a learner: the ids of the records that it learnt from or was judged on.
LEARNT_FILE = "learnt_from.json"
_PARTS = 8  # segments that a full journal has at least
_LONGEST_SEGMENT = 16 << 20  # bytes


@dataclass(frozen=True)
class Retention:
    """What a tenant's journal may hold. days: the age of a record. bytes: the bytes of all
    segments; the oldest records are deleted first. None: no limit."""

    days: float | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("--keep-days", self.days), ("--keep-bytes", self.bytes)):
            if value is not None and value <= 0:
                raise UserError(f"{name} is {value}; expected a number above 0")


def hash_user(user: str) -> str:
    """What a record keeps of a user's name."""
    return hashlib.sha256(user.encode()).hexdigest()


def make_record(exchange: Exchange, user: str | None, now: float) -> dict[str, Any]:
    """A record without personal data in its texts. now: seconds since 1970."""
    prompt: Counter[str] = Counter()
    messages = []
    for message in exchange.messages:
        content, counts = redact(message["content"])
        prompt += counts
        messages.append({"role": message["role"], "content": content})
    text, answer = redact(exchange.answer)
    return {
        "id": uuid.uuid4().hex,
        "time": now,
        "model": exchange.model,
        "request": exchange.request,
        "user": None if user is None else hash_user(user),
        "messages": [*messages, {"role": "assistant", "content": text}],
        "redacted": {"prompt": dict(prompt), "answer": dict(answer)},
    }


class Records:
    """A tenant's journal. The directory is made at the first append."""

    def __init__(self, directory: Path, retention: Retention = Retention()) -> None:
        self.directory, self.retention = directory, retention
        limit = retention.bytes
        self._segment_bytes = min(_LONGEST_SEGMENT, limit // _PARTS if limit else _LONGEST_SEGMENT)

    def append(self, record: dict[str, Any]) -> None:
        """Store a record; it is on disk when this returns. Raises UserError if it cannot be."""
        line = (json.dumps(record, ensure_ascii=True) + "\n").encode()
        try:
            self.directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.directory.mkdir(mode=0o700, exist_ok=True)
            with self._locked():
                self._append(line, record["time"])
        except OSError as error:
            raise UserError(f"cannot record in {self.directory}: {error}") from error

    def prune(self, now: float) -> int:
        """Delete what the retention does not allow at this time, in seconds since 1970. Returns the
        number of records deleted."""
        if not self.directory.is_dir():
            return 0
        with self._locked():
            dropped = 0
            if self.retention.days is not None:
                oldest = now - DAY * self.retention.days
                dropped = self._keep(lambda record: record["time"] >= oldest, before=oldest)
            return dropped + self._drop_segments()

    def forget(self, *, user: str | None = None, request: str | None = None) -> list[str]:
        """Delete all records of a user, or of a request. Returns their ids."""
        if not self.directory.is_dir():
            return []
        hashed = None if user is None else hash_user(user)
        ids: list[str] = []

        def stays(record: dict[str, Any]) -> bool:
            theirs = (hashed is not None and record.get("user") == hashed) or (
                request is not None and record.get("request") == request
            )
            if theirs:
                ids.append(record["id"])
            return not theirs

        with self._locked():
            self._keep(stays)
        return ids

    def read(self, after: float = 0.0) -> list[dict[str, Any]]:
        """The records that are newer than `after` (seconds since 1970), oldest first."""
        if not self.directory.is_dir():
            return []
        with self._locked():
            segments = self._segments()
            # A segment ends where the next one begins. The directory is there before the first one.
            ends = [*map(_begin, segments[1:]), float("inf")][: len(segments)]
            newer = [path for path, end in zip(segments, ends, strict=True) if end > after]
            records = [r for path in newer for r in _records(path) if r["time"] > after]
        return sorted(records, key=lambda record: record["time"])

    def _append(self, line: bytes, now: float) -> None:
        segments = self._segments()
        newest = segments[-1] if segments else None
        begins_day = newest is None or now - _begin(newest) > DAY
        if newest is None or begins_day or newest.stat().st_size >= self._segment_bytes:
            newest = self.directory / f"records-{int(1000 * now):016d}.jsonl"
        _cut_torn_line(newest)
        with open(newest, "ab", buffering=0, opener=_private) as file:
            file.write(line)
            os.fsync(file.fileno())
        self._drop_segments()

    def _drop_segments(self) -> int:
        """Delete the oldest segments until the others fit, but never the newest."""
        segments = self._segments()
        sizes = [path.stat().st_size for path in segments]
        dropped = 0
        while self.retention.bytes and len(segments) > 1 and sum(sizes) > self.retention.bytes:
            dropped += sum(1 for _ in _records(segments[0]))
            segments.pop(0).unlink()
            sizes.pop(0)
        return dropped

    def _keep(self, stays: Callable[[dict[str, Any]], bool], before: float = float("inf")) -> int:
        """Write every segment again without the other records. Returns how many were deleted.
        before: segments that began later, by their names, have none to delete."""
        dropped = 0
        for path in self._segments():
            if _begin(path) >= before:
                break
            records = list(_records(path))
            kept = [record for record in records if stays(record)]
            dropped += len(records) - len(kept)
            if not kept:
                path.unlink()
            elif len(kept) < len(records):
                write_file(path, "".join(json.dumps(record) + "\n" for record in kept))
                path.chmod(0o600)
        return dropped

    def _segments(self) -> list[Path]:
        return sorted(self.directory.glob("records-*.jsonl"))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self.directory / ".lock", "a", encoding="utf-8", opener=_private) as lock:
            lock_file(lock.fileno(), wait=True)
            yield


def _private(path: str, flags: int) -> int:
    """Open a file that only its owner reads: it holds what people wrote."""
    return os.open(path, flags, 0o600)


def _begin(segment: Path) -> float:
    return int(segment.stem.partition("-")[2]) / 1000


def tenants(directory: Path) -> list[Path]:
    """The directories of all tenants, by name."""
    return sorted({path.parent for path in directory.glob("*/records-*.jsonl")})


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a segment, without torn lines."""
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "time" in record and "id" in record:
            yield record


def _cut_torn_line(path: Path) -> None:
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            os.fsync(file.fileno())
