"""What a target said of texts that it verified, kept within bounds for a drafter to learn from.

A request's text is stored once for all of its recorded tokens, since each rejection's context is a
prefix of it. A recorded token takes `bytes_per_position(k, V)` bytes, a token of text 4. Of heads
on the target it takes one more, for which head it was, and each draft with recorded tokens takes
`bytes_per_draft`, for the hidden states that it was made from.

Shapes: T tokens of a text, n of them recorded, k likeliest tokens of a distribution, V (draft)
vocabulary; m drafts, F numbers of hidden state that heads read.
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
from distill.teacher.signal import TopK
from distill.teacher.top_k_cache import bytes_per_token, require_same_teacher

SHARD = "shard"
FILE = "records.safetensors"
# Below it a probability is 0 in float16 too; an infinite log-probability would make 0·∞ = NaN.
LEAST = -6e4
EACH = ("places", "rejected", "ids", "log_p", "log_tail")  # one row of each recorded token
DRAFTED = ("depths", "read", "features")


def bytes_per_position(k: int, vocab_size: int) -> int:
    """What a recorded token takes, in memory and on disk: the target's k likeliest tokens with
    their log-probabilities and the tail, its place in the text and whether it was rejected there.
    """
    return bytes_per_token(k, vocab_size) + 4 + 1


def bytes_per_draft(features: int, dtype: torch.dtype) -> int:
    """What the hidden states that a draft was made from take, F numbers in the target's dtype, with
    the place they are from; stored once for all recorded tokens of the draft."""
    return features * dtype.itemsize + 4


def to_numpy(x: Tensor) -> np.ndarray:
    """A copy on the host, to the bit; of bfloat16, which NumPy does not know, its bits as int16."""
    x = x.detach().to("cpu", copy=True)
    found: np.ndarray = (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()
    return found


def from_numpy(x: np.ndarray) -> Tensor:
    """What `to_numpy` was given."""
    found = torch.as_tensor(x)
    return found.view(torch.bfloat16) if x.dtype == np.int16 else found


@dataclass(frozen=True)
class Drafted:
    """By which heads, from what, a record's tokens were drafted.

    depths: uint8 [n], the head of each recorded token, from 1, which read the hidden states of
    tokens[place − depth − 1]. read: int32 [m], ascending, all such tokens. features: [m, F], their
    hidden states as `to_numpy` gives them, in the target's dtype.
    """

    depths: np.ndarray
    read: np.ndarray
    features: np.ndarray

    def part(self, places: np.ndarray, here: np.ndarray, begin: int) -> "Drafted":
        """Of the recorded tokens `here` (bool [n]) only, in the text from token `begin` on."""
        depths = self.depths[here]
        kept = np.isin(self.read, places[here] - depths - 1)
        return Drafted(depths, self.read[kept] - begin, self.features[kept])


@dataclass(frozen=True)
class Record:
    """Some tokens of one request's text, with the target's distribution for each.

    request: which one. tokens: int32 [T], prompt included, up to the last recorded token. places:
    int32 [n], ascending, each ≥ 1: the distribution is that of tokens[place] after those before
    it. rejected: bool [n], the drafter's token was rejected there. ids [n, k] unsigned or int32,
    log_p float16 [n, k], log_tail float32 [n]: as `distill.teacher.signal.TopK`, at temperature 1
    and before any processor.

    drafted: of heads on the target; None for a small language model.
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
        """The same recorded tokens in texts of at most `most` ≥ 2 tokens, for models that see no
        more. A token keeps the last tokens before it: all there are, or at least half of `most`,
        among which must be the one that its head read.
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
    """The target's word on all recorded tokens, one text after the other."""

    def joined(name: str, dtype: torch.dtype) -> Tensor:
        whole = np.concatenate([getattr(record, name) for record in records])
        # NumPy's unsigned integers are not all known to torch.
        whole = whole.astype(np.int64) if dtype == torch.int64 else whole
        return torch.as_tensor(whole).to(device, dtype)

    log_p, log_tail = joined("log_p", torch.float32), joined("log_tail", torch.float32)
    # float16 leaves a sum of 1 but for a thousandth, and losses in closed form count on 1.
    total = torch.logaddexp(log_p.logsumexp(-1), log_tail)
    return TopK(joined("ids", torch.int64), log_p - total[:, None], log_tail - total)


class ReplayBuffer:
    """The newest records that fit into `max_bytes`; those before them are forgotten.

    A record alone larger than that is not taken in. With a `directory` every `commit` writes what
    came since the last one into a shard there, whole or not at all, and deletes shards whose
    records are all forgotten; `restore` reads them after a restart. made_with: as
    `distill.teacher.top_k_cache.describe_teacher` gives it, what the numbers depend on.
    """

    def __init__(
        self, max_bytes: int, made_with: dict[str, Any], directory: Path | None = None
    ) -> None:
        self.max_bytes, self.made_with, self.directory = max_bytes, made_with, directory
        self._records: deque[Record] = deque()
        self.first = 0  # the number of the oldest record that is kept, counted from the beginning
        self.nbytes = 0
        self._written = 0  # records below this number are on disk, or were forgotten before

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    @property
    def next(self) -> int:
        """The number that the next record will get."""
        return self.first + len(self._records)

    @property
    def positions(self) -> int:
        """How many tokens are recorded."""
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
        """Forget all but the newest `count` records."""
        while len(self._records) > count:
            self._forget()

    def _forget(self) -> None:
        self.nbytes -= self._records.popleft().nbytes
        self.first += 1

    def commit(self) -> None:
        """Bring the directory up to date. UserError where it cannot be written (a full disk, say);
        all that was there before is whole then."""
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
        """Read the directory's records numbered first … end−1; None: to the last.

        Raises UserError when they were made from another target, revision, dtype, vocabulary or k,
        and CorruptArtifact, naming the file, for a shard that is damaged. A shard that was deleted
        is only missed.
        """
        assert self.directory is not None, "a buffer in memory has nothing to restore"
        recover(self.directory)
        self._records.clear()
        self.nbytes, self.first = 0, first
        for number, path in _shards(self.directory):
            if end is not None and number >= end:
                remove_directory(path)  # written after the state that is gone back to
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
    return f"{made_for['count']} heads on the hidden states {made_for['taps']}"


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
