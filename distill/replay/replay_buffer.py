"""A replay buffer of limited size: target distributions recorded during verification.

A drafter learns from them. The text of a request is stored once for all of its recorded tokens,
because the context of each rejection is a prefix of it. A recorded token takes
`bytes_per_position(k, V)` bytes, a token of text takes 4. With heads on the target, a recorded
token takes one more byte for the number of the head, and each draft with recorded tokens takes
`bytes_per_draft` for the hidden states that it was computed from.

Shapes: T tokens of a text, n of them recorded, k most likely tokens of a distribution, V (draft)
vocabulary, m drafts, F numbers of hidden state that heads read.
"""

import itertools
import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decode.base.artifact import (
    numbers_of,
    recover,
    remove_directory,
    verify_directory,
    write_directory,
)
from decode.base.errors import UserError
from decode.model.loading import Target
from distill.teacher.teacher_signal import TopK
from distill.teacher.top_k_cache import bytes_per_token, require_same_teacher

SHARD = "shard"
FILE = "records.safetensors"
# Lower bound of stored log-probabilities. Below it a probability is 0 in float16 anyway. An
# infinite log-probability would give 0·∞ = NaN.
MIN_LOG_P = -6e4
# The fields of a record with one row per recorded token, and their names in a shard.
PER_TOKEN = {
    "positions": "places",
    "rejected": "rejected",
    "ids": "ids",
    "log_p": "log_p",
    "log_tail": "log_tail",
}
# The fields of `HeadDrafts`, and their names in a shard. One of whole texts has no "read".
HEAD_DRAFTS = {"depths": "depths", "read_positions": "read", "features": "features"}


def bytes_per_position(k: int, vocab_size: int) -> int:
    """Bytes of a recorded token, in memory and on disk.

    It stores the target's k most likely tokens with their log-probabilities, the tail, the position
    in the text, and whether the draft token was rejected there.
    """
    return bytes_per_token(k, vocab_size) + 4 + 1


def bytes_per_draft(features: int, dtype: torch.dtype, *, whole_text: bool = False) -> int:
    """Bytes of the hidden states that a draft was computed from, and of their position.

    These are F numbers in the target's dtype, stored once for all recorded tokens of the draft.
    whole_text: of those of a token of text, which need no position.
    """
    return features * dtype.itemsize + 4 * (not whole_text)


def to_numpy(x: Tensor) -> np.ndarray:
    """Return an exact copy on the host. NumPy has no bfloat16, so it becomes the bits as int16."""
    x = x.detach().to("cpu", copy=True)
    array: np.ndarray = (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()
    return array


def from_numpy(x: np.ndarray) -> Tensor:
    """Inverse of `to_numpy`."""
    tensor = torch.as_tensor(x)
    return tensor.view(torch.bfloat16) if x.dtype == np.int16 else tensor


@dataclass(frozen=True)
class HeadDrafts:
    """Which heads drafted the tokens of a record, and from which hidden states.

    depths: uint8 [n], the head of each recorded token, from 1. It read the hidden states of
    tokens[position − depth − 1]. read_positions: int32 [m], those of all such tokens, ascending;
    None: the first m tokens of the text, for heads that attend to all of it. features: [m, F],
    their hidden states, returned by `to_numpy`, in the target's dtype.
    """

    depths: np.ndarray
    read_positions: np.ndarray | None
    features: np.ndarray

    def part(self, positions: np.ndarray, chosen: np.ndarray, begin: int) -> "HeadDrafts":
        """Keep only the recorded tokens `chosen` (bool [n]) for the text that starts at `begin`.

        positions: int [n], those of all recorded tokens.
        """
        depths = self.depths[chosen]
        if self.read_positions is None:
            return HeadDrafts(depths, None, self.features[begin : positions[chosen][-1]])
        kept = np.isin(self.read_positions, positions[chosen] - depths - 1)
        return HeadDrafts(depths, self.read_positions[kept] - begin, self.features[kept])


@dataclass(frozen=True)
class Record:
    """Recorded tokens of one request's text, with the target's distribution for each.

    request: its number. tokens: int32 [T], the text with its prompt, up to the last recorded token.
    positions: int32 [n], those of the recorded tokens, ascending, each ≥ 1. The distribution of a
    position is that of tokens[position] given the tokens before it. rejected: bool [n], True
    where the draft token was rejected. ids [n, k] unsigned or int32, log_p float16 [n, k], log_tail
    float32 [n]: as in `distill.teacher.teacher_signal.TopK`, at temperature 1 and before any
    processor.

    head_drafts: for heads on the target; None for a small language model.
    """

    request: int
    tokens: np.ndarray
    positions: np.ndarray
    rejected: np.ndarray
    ids: np.ndarray
    log_p: np.ndarray
    log_tail: np.ndarray
    head_drafts: HeadDrafts | None = None

    @property
    def nbytes(self) -> int:
        values = [*vars(self).values()]
        if self.head_drafts is not None:
            values += vars(self.head_drafts).values()
        return sum(x.nbytes for x in values if isinstance(x, np.ndarray))

    def pieces(self, max_tokens: int) -> list["Record"]:
        """Split into records of at most `max_tokens` ≥ 2, for models with a limited context.

        The recorded tokens stay the same. Each keeps the tokens just before it: all of them, or at
        least half of `max_tokens`. The token that its head read must be among them.
        """
        if len(self.tokens) <= max_tokens:
            return [self]
        pieces, covered = [], 0  # covered: the end of the piece before
        for begin in range(0, len(self.tokens), max_tokens // 2):
            end = begin + max_tokens
            chosen = (self.positions >= covered) & (self.positions < end)
            covered = end
            if chosen.any():
                rows = {name: getattr(self, name)[chosen] for name in PER_TOKEN}
                tokens = self.tokens[begin : int(rows["positions"][-1]) + 1]
                rows["positions"] = rows["positions"] - begin
                drafts = self.head_drafts and self.head_drafts.part(self.positions, chosen, begin)
                pieces.append(replace(self, tokens=tokens, head_drafts=drafts, **rows))
        return pieces


def recorded_signal(records: Sequence[Record], device: torch.device) -> TopK:
    """Return the teacher signal for all recorded tokens, one text after the other."""

    def joined(name: str, dtype: torch.dtype) -> Tensor:
        rows = np.concatenate([getattr(record, name) for record in records])
        # torch does not support all unsigned integers of NumPy.
        rows = rows.astype(np.int64) if dtype == torch.int64 else rows
        return torch.as_tensor(rows).to(device, dtype)

    log_p, log_tail = joined("log_p", torch.float32), joined("log_tail", torch.float32)
    # In float16 the sum is off from 1 by about a thousandth, but losses in closed form need 1.
    total = torch.logaddexp(log_p.logsumexp(-1), log_tail)
    return TopK(joined("ids", torch.int64), log_p - total[:, None], log_tail - total)


def padded_tokens(records: Sequence[Record], pad_id: int = 0) -> tuple[Tensor, Tensor]:
    """Return the texts as one batch, padded on the right, and its attention mask.

    Both are int64 [B, T] on the CPU.
    """
    rows = [torch.as_tensor(record.tokens, dtype=torch.int64) for record in records]
    input_ids = pad_sequence(rows, batch_first=True, padding_value=pad_id)
    return input_ids, pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)


def padded_values(
    records: Sequence[Record], positions: Sequence[np.ndarray | None], values: Sequence[Tensor]
) -> Tensor:
    """[B, T, …]: the values of each text at their positions, 0 at all other positions.

    positions: int [m] for each record; None: the first m. values: [m, …] for each record.
    """
    rows = []
    for record, record_positions, x in zip(records, positions, values, strict=True):
        row = x.new_zeros(len(record.tokens), *x.shape[1:])
        if record_positions is None:
            row[: len(x)] = x
        else:
            row[torch.as_tensor(record_positions, dtype=torch.int64)] = x
        rows.append(row)
    return pad_sequence(rows, batch_first=True)


class ReplayBuffer:
    """Keeps the newest records that fit into `max_bytes` and drops older ones.

    A single record larger than `max_bytes` is not added. With a `directory`, every `commit`
    atomically writes the new records as a shard. `restore` reads the shards after a restart, and
    `forget` deletes those that no restart needs. made_with: the result of
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
    def position_count(self) -> int:
        """The number of recorded tokens."""
        return sum(len(record.positions) for record in self._records)

    def add(self, records: Iterable[Record]) -> None:
        for record in records:
            if record.nbytes > self.max_bytes:
                continue
            self._records.append(record)
            self.nbytes += record.nbytes
            while self.nbytes > self.max_bytes:
                self._drop_oldest()

    def keep_newest(self, count: int) -> None:
        """Drop all but the newest `count` records."""
        while len(self._records) > count:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self.nbytes -= self._records.popleft().nbytes
        self.first += 1

    def commit(self) -> None:
        """Write the records that are not on disk yet. Nothing is deleted: what was saved before
        may name the shards.

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

    def forget(self, first: int) -> None:
        """Delete the shards that have only records below number `first`."""
        if self.directory is None:
            return
        for (_, path), (following, _) in itertools.pairwise(_shards(self.directory)):
            if following <= first:
                remove_directory(path)

    def restore(self, target: Target, *, first: int = 0, end: int | None = None) -> None:
        """Read the records first … end−1 from the directory. With end=None, read to the last.

        Raises UserError if they were made with another target, other weights, another revision,
        dtype, vocabulary or k, or for other heads. Raises CorruptArtifact, naming the file, for a
        damaged shard. A deleted shard is no error; its records are just missing.
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
            self._drop_oldest()

    def _require_same(self, stored: dict[str, Any], target: Target, path: Path) -> None:
        require_same_teacher(stored, self.made_with, target, f"the replay buffer {path}")
        if stored["k"] != self.made_with["k"]:
            raise UserError(
                f"the replay buffer {path} keeps the {stored['k']} likeliest tokens, expected "
                f"{self.made_with['k']}; delete it, or set k to its old value"
            )
        recorded_for, learner = (x.get("heads") for x in (stored, self.made_with))
        if recorded_for != learner:
            raise UserError(
                f"the replay buffer {path} was recorded for {_describe(recorded_for)}, but the "
                f"drafter that learns is {_describe(learner)}; delete the buffer, or continue "
                "with the drafter it was recorded for"
            )


def _shards(directory: Path) -> list[tuple[int, Path]]:
    return [(number, directory / f"{SHARD}-{number}") for number in numbers_of(directory, SHARD)]


def describe_heads(count: int, captured_layers: Sequence[int]) -> dict[str, Any]:
    """What `made_with` says besides of records of heads."""
    return {"heads": {"count": count, "captured_layers": list(captured_layers)}}


def _describe(heads: dict[str, Any] | None) -> str:
    if heads is None:
        return "a small language model"
    return f"{heads['count']} heads on the hidden states {heads['captured_layers']}"


def _store(path: Path, records: Sequence[Record]) -> None:
    arrays = {"tokens": [r.tokens for r in records]}
    for field, name in PER_TOKEN.items():
        arrays[name] = [getattr(r, field) for r in records]
    drafts = [r.head_drafts for r in records if r.head_drafts is not None]
    if drafts:
        for field, name in HEAD_DRAFTS.items():
            values = [getattr(d, field) for d in drafts]
            if values[0] is not None:
                arrays[name] = values
    # safetensors writes an array as it lies in memory, and columns may lie side by side.
    save_file(
        {name: np.ascontiguousarray(np.concatenate(rows)) for name, rows in arrays.items()},
        path / FILE,
    )
    counts = [
        [
            r.request,
            len(r.tokens),
            len(r.positions),
            len(r.head_drafts.features) if r.head_drafts else 0,
        ]
        for r in records
    ]
    (path / "records.json").write_text(json.dumps(counts), encoding="utf-8")


def _load(path: Path) -> list[Record]:
    arrays = load_file(path / FILE)
    records = []
    begins = [0, 0, 0]
    for request, *counts in json.loads((path / "records.json").read_text(encoding="utf-8")):
        ends = [begin + count for begin, count in zip(begins, counts, strict=True)]
        text, tokens, drafts = (slice(*bounds) for bounds in zip(begins, ends, strict=True))
        head_drafts = None
        if "depths" in arrays:
            read = arrays["read"][drafts] if "read" in arrays else None
            head_drafts = HeadDrafts(arrays["depths"][tokens], read, arrays["features"][drafts])
        per_token = {field: arrays[name][tokens] for field, name in PER_TOKEN.items()}
        records.append(
            Record(request, arrays["tokens"][text], **per_token, head_drafts=head_drafts)
        )
        begins = ends
    return records
