"""A replay buffer of limited size: target distributions recorded during verification.

A drafter learns from them. The text of a request is stored once for all of its recorded tokens,
because the context of each rejection is a prefix of it. A recorded token takes
`bytes_per_position(k, V)` bytes, a token of text takes 4. With heads on the target, a recorded
token takes one more byte for the number of the head, and each draft with recorded tokens takes
`bytes_per_draft` for the hidden states that it was computed from.

Shapes: T tokens of a text, n of them recorded, k most likely tokens of a distribution, V (draft)
vocabulary, m drafts, F numbers of hidden state that heads read.
"""

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from decode.artifact import recover, remove_directory, verify_directory, write_directory
from decode.errors import UserError
from decode.target.loading import Target
from distill.teacher.teacher_signal import TopK
from distill.teacher.top_k_cache import bytes_per_token, require_same_teacher

SHARD = "shard"
FILE = "records.safetensors"
# Lower bound of stored log-probabilities. Below it a probability is 0 in float16 anyway. An
# infinite log-probability would give 0·∞ = NaN.
LEAST = -6e4
EACH = ("places", "rejected", "ids", "log_p", "log_tail")  # one row per recorded token
DRAFTED = ("depths", "read", "features")


def bytes_per_position(k: int, vocab_size: int) -> int:
    """Bytes of a recorded token, in memory and on disk.

    It stores the target's k most likely tokens with their log-probabilities, the tail, the position
    in the text, and whether the draft token was rejected there.
    """
    return bytes_per_token(k, vocab_size) + 4 + 1


def bytes_per_draft(features: int, dtype: torch.dtype) -> int:
    """Bytes of the hidden states that a draft was computed from, and of their position.

    These are F numbers in the target's dtype, stored once for all recorded tokens of the draft.
    """
    return features * dtype.itemsize + 4


def to_numpy(x: Tensor) -> np.ndarray:
    """Return an exact copy on the host. NumPy has no bfloat16, so it becomes the bits as int16."""
    x = x.detach().to("cpu", copy=True)
    found: np.ndarray = (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()
    return found


def from_numpy(x: np.ndarray) -> Tensor:
    """Inverse of `to_numpy`."""
    found = torch.as_tensor(x)
    return found.view(torch.bfloat16) if x.dtype == np.int16 else found


@dataclass(frozen=True)
class Drafted:
    """Which heads drafted the tokens of a record, and from which hidden states.

    depths: uint8 [n], the head of each recorded token, from 1. It read the hidden states of
    tokens[place − depth − 1]. read: int32 [m], the positions of all such tokens, ascending.
    features: [m, F], their hidden states, returned by `to_numpy`, in the target's dtype.
    """

    depths: np.ndarray
    read: np.ndarray
    features: np.ndarray

    def part(self, places: np.ndarray, here: np.ndarray, begin: int) -> "Drafted":
        """Keep only the recorded tokens `here` (bool [n]) for the text that starts at `begin`."""
        depths = self.depths[here]
        kept = np.isin(self.read, places[here] - depths - 1)
        return Drafted(depths, self.read[kept] - begin, self.features[kept])


@dataclass(frozen=True)
class Record:
    """Recorded tokens of one request's text, with the target's distribution for each.

    request: its number. tokens: int32 [T], the text with its prompt, up to the last recorded token.
    places: int32 [n], the positions of the recorded tokens, ascending, each ≥ 1. The distribution
    of a position is that of tokens[place] given the tokens before it. rejected: bool [n], True
    where the draft token was rejected. ids [n, k] unsigned or int32, log_p float16 [n, k], log_tail
    float32 [n]: as in `distill.teacher.teacher_signal.TopK`, at temperature 1 and before any
    processor.

    drafted: for heads on the target; None for a small language model.
    """

    request: int
    tokens: np.ndarray
    places: np.ndarray
    rejected: np.ndarray
    ids: np.ndarray
    log_p: np.ndarray
    log_tail: np.ndarray
    drafted: Drafted | None = None

    @property
    def nbytes(self) -> int:
        whole = [*vars(self).values(), *(vars(self.drafted).values() if self.drafted else ())]
        return sum(x.nbytes for x in whole if isinstance(x, np.ndarray))

    def windows(self, most: int) -> list["Record"]:
        """Split into records of at most `most` ≥ 2 tokens, for models with a limited context.

        The recorded tokens stay the same. Each keeps the tokens just before it: all of them, or at
        least half of `most`. The token that its head read must be among them.
        """
        if len(self.tokens) <= most:
            return [self]
        step = most // 2
        found, done = [], 0
        for begin in range(0, len(self.tokens), step):
            end = begin + most
            here = (self.places >= done) & (self.places < end)
            done = end
            if here.any():
                own = self.places[here]
                tokens = self.tokens[begin : int(own[-1]) + 1]
                parts = {name: getattr(self, name)[here] for name in EACH[1:]}
                drafted = self.drafted and self.drafted.part(self.places, here, begin)
                found.append(
                    replace(self, tokens=tokens, places=own - begin, drafted=drafted, **parts)
                )
        return found


def signal_of(records: Sequence[Record], device: torch.device) -> TopK:
    """Return the teacher signal for all recorded tokens, one text after the other."""

    def joined(name: str, dtype: torch.dtype) -> Tensor:
        whole = np.concatenate([getattr(record, name) for record in records])
        # torch does not support all unsigned integers of NumPy.
        whole = whole.astype(np.int64) if dtype == torch.int64 else whole
        return torch.as_tensor(whole).to(device, dtype)

    log_p, log_tail = joined("log_p", torch.float32), joined("log_tail", torch.float32)
    # In float16 the sum is off from 1 by about a thousandth, but losses in closed form need 1.
    total = torch.logaddexp(log_p.logsumexp(-1), log_tail)
    return TopK(joined("ids", torch.int64), log_p - total[:, None], log_tail - total)


class ReplayBuffer:
    """Keeps the newest records that fit into `max_bytes` and drops older ones.

    A single record larger than `max_bytes` is not added. With a `directory`, every `commit`
    atomically writes the new records as a shard and deletes shards whose records are all dropped.
    `restore` reads the shards after a restart. made_with: the result of
    `distill.teacher.top_k_cache.describe_teacher`, the settings that the numbers depend on.
    """

    def __init__(
        self, max_bytes: int, made_with: dict[str, Any], directory: Path | None = None
    ) -> None:
        self.max_bytes, self.made_with, self.directory = max_bytes, made_with, directory
        self._records: deque[Record] = deque()
        self.first = 0  # the number of the oldest kept record, counted from the start
        self.nbytes = 0
        self._written = 0  # records below this number are on disk, or were dropped before

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    @property
    def next(self) -> int:
        """The number of the next record."""
        return self.first + len(self._records)

    @property
    def positions(self) -> int:
        """The number of recorded tokens."""
        return sum(len(record.places) for record in self._records)

    def add(self, records: Iterable[Record]) -> None:
        for record in records:
            if record.nbytes > self.max_bytes:
                continue
            self._records.append(record)
            self.nbytes += record.nbytes
            while self.nbytes > self.max_bytes:
                self._forget()

    def keep_newest(self, count: int) -> None:
        """Drop all but the newest `count` records."""
        while len(self._records) > count:
            self._forget()

    def _forget(self) -> None:
        self.nbytes -= self._records.popleft().nbytes
        self.first += 1

    def commit(self) -> None:
        """Bring the directory up to date.

        Raises UserError if it cannot be written, for example on a full disk. The existing shards
        then stay intact.
        """
        if self.directory is None:
            return
        begin = max(self._written, self.first)
        new = list(self._records)[begin - self.first :]
        if new:
            meta = {"made_with": self.made_with, "first": begin, "count": len(new)}
            write_directory(
                self.directory / f"{SHARD}-{begin}", lambda path: _store(path, new), meta=meta
            )
        self._written = self.next
        for number, path in _shards(self.directory):
            following = [n for n, _ in _shards(self.directory) if n > number]
            if following and following[0] <= self.first:
                remove_directory(path)

    def restore(self, target: Target, *, first: int = 0, end: int | None = None) -> None:
        """Read the records first … end−1 from the directory. With end=None, read to the last.

        Raises UserError if they were made with another target, revision, dtype, vocabulary or k.
        Raises CorruptArtifact, naming the file, for a damaged shard. A deleted shard is no error;
        its records are just missing.
        """
        assert self.directory is not None, "a buffer in memory has nothing to restore"
        recover(self.directory)
        self._records.clear()
        self.nbytes, self.first = 0, first
        for number, path in _shards(self.directory):
            if end is not None and number >= end:
                remove_directory(path)  # written after the state to restore
                continue
            meta = verify_directory(path)
            self._require_same(meta["made_with"], target, path)
            records = _load(path)[max(first - number, 0) : None if end is None else end - number]
            self._records.extend(records)
            self.nbytes += sum(record.nbytes for record in records)
            end_of_shard = number + int(meta["count"])
            if end is None:
                self.first = end_of_shard - len(self._records)
        if end is not None:
            self.first = end - len(self._records)
        self._written = self.next
        while self.nbytes > self.max_bytes:
            self._forget()

    def _require_same(self, found: dict[str, Any], target: Target, path: Path) -> None:
        require_same_teacher(found, self.made_with, target, f"the replay buffer {path}")
        if found["k"] != self.made_with["k"]:
            raise UserError(
                f"the replay buffer {path} keeps the {found['k']} likeliest tokens, expected "
                f"{self.made_with['k']}; delete it, or set k as it was"
            )
        theirs, own = (x.get("heads") for x in (found, self.made_with))
        if theirs != own:
            raise UserError(
                f"the replay buffer {path} was recorded for {_heads(theirs)}, and the drafter that "
                f"learns is {_heads(own)}; delete it, or go on with the drafter it was made for"
            )


def _shards(directory: Path) -> list[tuple[int, Path]]:
    found = []
    for path in directory.glob(f"{SHARD}-*"):
        match = re.fullmatch(rf"{SHARD}-(\d+)", path.name)
        if match:
            found.append((int(match[1]), path))
    return sorted(found)


def _heads(made_for: dict[str, Any] | None) -> str:
    if made_for is None:
        return "a small language model"
    return f"{made_for['count']} heads on the hidden states {made_for['captured_layers']}"


def _store(path: Path, records: Sequence[Record]) -> None:
    parts = {name: [getattr(r, name) for r in records] for name in ("tokens", *EACH)}
    drafted = [r.drafted for r in records if r.drafted is not None]
    if drafted:
        parts |= {name: [getattr(d, name) for d in drafted] for name in DRAFTED}
    save_file({name: np.concatenate(arrays) for name, arrays in parts.items()}, path / FILE)
    rows = [
        [r.request, len(r.tokens), len(r.places), len(r.drafted.read) if r.drafted else 0]
        for r in records
    ]
    (path / "records.json").write_text(json.dumps(rows))


def _load(path: Path) -> list[Record]:
    whole = load_file(path / FILE)
    records = []
    at = [0, 0, 0]
    for request, *counts in json.loads((path / "records.json").read_text()):
        text, each, drafts = (slice(i, i + n) for i, n in zip(at, counts, strict=True))
        drafted = None
        if "depths" in whole:
            own = zip(DRAFTED, (each, drafts, drafts), strict=True)
            drafted = Drafted(*(whole[name][rows] for name, rows in own))
        parts = {name: whole[name][each] for name in EACH}
        records.append(Record(request, whole["tokens"][text], **parts, drafted=drafted))
        at = [i + n for i, n in zip(at, counts, strict=True)]
    return records
