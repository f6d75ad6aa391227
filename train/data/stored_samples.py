"""The samples of a text in Arrow files, which `datasets` maps into memory.

A text of a million conversations takes gigabytes as Python lists. In these files a token takes four
bytes and a bit, which the processes of a machine share, and only the rows of a batch become lists.
Each part is written completely or not at all; `datasets.Dataset.from_file` reads its file too.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

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
    predicted: int32 [n], how many of them a loss predicts. counts: the counts of `fit`, over all
    parts. Raises UserError (CorruptArtifact) with the name of a damaged part.
    """

    def __init__(self, directory: Path, parts: int) -> None:
        import datasets  # takes a second

        self.counts = Counter(dict.fromkeys(COUNTS, 0))
        tables = []
        for part in (sample_part(directory, number) for number in range(parts)):
            for reason, count in verify_directory(part)["counts"].items():
                self.counts[reason] += count
            tables.append(datasets.Dataset.from_file(str(part / FILE)))
        self._data = datasets.concatenate_datasets(tables)
        numbers = self._data.select_columns(["length", "predicted"]).with_format("numpy")[:]
        self.lengths = np.asarray(numbers["length"], np.int32)
        self.predicted = np.asarray(numbers["predicted"], np.int32)
        self._ids = self._data.select_columns(["id"])
        self._data = self._data.select_columns(COLUMNS)

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
        return [Sample(*row) for row in zip(*(columns[name] for name in COLUMNS), strict=True)]

    def texts(self, first: int, end: int) -> Iterator[tuple[str, Any, Any]]:
        """(id, int32 tokens [T], bool mask [T]) of the samples first … end−1. No token becomes a
        Python number."""
        data = self._data.select_columns(["id", "tokens", "mask"]).with_format("arrow")
        for begin in range(first, end, BLOCK):
            last = min(begin + BLOCK, end)
            table = data[begin:last]
            splits = np.cumsum(self.lengths[begin:last])[:-1]
            tokens, mask = (
                table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
                for name in ("tokens", "mask")
            )
            yield from zip(
                table["id"].to_pylist(),
                np.split(tokens, splits),
                np.split(mask, splits),
                strict=True,
            )

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
