"""The samples of a text in Arrow files, which `datasets` maps into memory.

A text of a million conversations takes gigabytes as Python lists. In these files a token takes four
bytes and a bit, which the processes of a machine share, and only the rows of a batch become lists.
Each part is written completely or not at all; `datasets.Dataset.from_file` reads its file too.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from decode.base.artifact import verify_directory
from train.data.chat_tokens import Sample

PART = "part-"
FILE = "samples.arrow"  # in a part
COLUMNS = ["id", "tokens", "mask", "source"]  # the fields of a sample
BLOCK = 512  # samples that are lists at a time
LOST = ("too long", "no response tokens")  # why a sample cannot be trained on
COUNTS = ("read", "kept", "truncated", *LOST)


class StoredSamples(Sequence[Sample]):
    """The samples of a directory's parts, in order. Each is read when it is asked for.

    parts: how many there must be, at least one. lengths: int32 [n], the tokens of each sample.
    predicted: int32 [n], how many of them a loss predicts. counts: read = kept + "too long" + "no
    response tokens"; `truncated` samples are among the kept. meta: of the parts. Raises UserError
    (CorruptArtifact) with the name of a damaged part.
    """

    def __init__(self, directory: Path, parts: int) -> None:
        import datasets  # takes a second

        self.directory = directory
        tables, self.meta = [], []
        for part in (sample_part(directory, number) for number in range(parts)):
            self.meta.append(verify_directory(part))
            tables.append(datasets.Dataset.from_file(str(part / FILE)))
        data = datasets.concatenate_datasets(tables)
        numbers = data.select_columns(["length", "predicted"]).with_format("numpy")[:]
        self._longest: int | None = None
        self._set(data, *(np.asarray(numbers[x], np.int32) for x in ("length", "predicted")))
        self.counts = Counter(dict.fromkeys(COUNTS, 0) | dict.fromkeys(COUNTS[:2], len(self)))

    def _set(self, data: Any, lengths: np.ndarray, predicted: np.ndarray) -> None:
        self._all, self.lengths, self.predicted = data, lengths, predicted
        self._data, self._ids = data.select_columns(COLUMNS), data.select_columns(["id"])

    def fitting(
        self, max_length: int, on_long: Literal["truncate", "drop"] = "truncate"
    ) -> "StoredSamples":
        """Those that can be trained on. A sample longer than `max_length` tokens is cut from the
        right or dropped. One without a response token (after the cut) is left out: it would cost a
        forward pass and teach nothing."""
        lengths, predicted = np.minimum(self.lengths, max_length), self.predicted.copy()
        long = self.lengths > max_length
        cut = self._some(np.flatnonzero(long))
        predicted[long] = [mask[1:max_length].sum() for *_, mask in cut.texts(0, len(cut))]
        dropped = long if on_long == "drop" else np.zeros_like(long)
        usable = ~dropped & (predicted > 0)
        found = self._some(np.flatnonzero(usable))
        found._longest = max_length
        found.lengths, found.predicted = lengths[usable], predicted[usable]
        lost = dropped.sum(), (~dropped & ~usable).sum()
        counts = (len(self), len(found), (long & usable).sum(), *lost)
        found.counts = Counter(dict(zip(COUNTS, map(int, counts), strict=True)))
        return found

    def _some(self, rows: np.ndarray) -> "StoredSamples":
        found = copy(self)
        data = self._all if len(rows) == len(self) else self._all.select(rows)
        found._set(data, self.lengths[rows], self.predicted[rows])
        return found

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[Sample]:
        return self.some(range(len(self)))

    def some(self, rows: Sequence[int]) -> Iterator[Sample]:
        """The samples with these numbers, in this order. Few of them are in memory at a time."""
        for begin in range(0, len(rows), BLOCK):
            yield from self.take(rows[begin : begin + BLOCK])

    @overload
    def __getitem__(self, rows: int) -> Sample: ...

    @overload
    def __getitem__(self, rows: slice) -> list[Sample]: ...

    def __getitem__(self, rows: int | slice) -> Sample | list[Sample]:
        if isinstance(rows, slice):
            return self.take(rows)
        return self.take([range(len(self))[rows]])[0]

    def take(self, rows: Sequence[int] | slice) -> list[Sample]:
        """The samples with these numbers, in this order."""
        if not isinstance(rows, slice) and not len(rows):
            return []
        columns = self._data[rows]
        samples = zip(*(columns[name] for name in COLUMNS), strict=True)
        cut = slice(self._longest)
        return [Sample(name, ids[cut], mask[cut], source) for name, ids, mask, source in samples]

    def texts(self, first: int, end: int) -> Iterator[tuple[str, Any, Any]]:
        """(id, int32 tokens [T], bool mask [T]) of the samples first … end−1. No token becomes a
        Python number."""
        data = self._all.select_columns(["id", "tokens", "mask", "length"]).with_format("arrow")
        for begin in range(first, end, BLOCK):
            last = min(begin + BLOCK, end)
            table = data[begin:last]
            splits = np.cumsum(table["length"].to_numpy())[:-1]
            tokens, mask = (
                np.split(table[name].combine_chunks().flatten().to_numpy(False), splits)
                for name in ("tokens", "mask")
            )
            for name, ids, marks in zip(table["id"].to_pylist(), tokens, mask, strict=True):
                yield name, ids[: self._longest], marks[: self._longest]

    def ids(self, rows: Sequence[int]) -> list[str]:
        """The ids of the samples with these numbers, in this order."""
        return list(self._ids[rows]["id"]) if len(rows) else []


def texts(samples: Sequence[Sample], first: int, end: int) -> Iterator[tuple[str, Any, Any]]:
    """(id, tokens, mask) of the samples first … end−1."""
    if isinstance(samples, StoredSamples):
        yield from samples.texts(first, end)
    else:
        yield from ((s.id, s.tokens, s.mask) for s in samples[first:end])


def sample_part(directory: Path, number: int) -> Path:
    """The directory of one part."""
    return directory / f"{PART}{number}"


def sizes(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """int32 [n] each: the tokens of each sample, and how many of them a loss predicts."""
    if isinstance(samples, StoredSamples):
        return samples.lengths, samples.predicted
    numbers = [(len(sample.tokens), sum(sample.mask[1:])) for sample in samples]
    lengths, predicted = np.array(numbers, np.int32).reshape(-1, 2).T
    return lengths, predicted


def take(samples: Sequence[Sample], rows: Sequence[int]) -> list[Sample]:
    """The samples with these numbers, in this order."""
    if isinstance(samples, StoredSamples):
        return samples.take(rows)
    return [samples[row] for row in rows]


def sample_ids(samples: Sequence[Sample], rows: Sequence[int]) -> list[str]:
    """The ids of the samples with these numbers, in this order."""
    if isinstance(samples, StoredSamples):
        return samples.ids(rows)
    return [samples[row].id for row in rows]
