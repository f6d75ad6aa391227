"""Documents as tokens with a suffix array, in files that are mapped into memory.

`tokens.npy` holds all documents one after the other, each with a 0 after it: token t is stored as
t + 1. `suffixes.npy` holds the positions of all tokens, sorted by the `SORTED_TOKENS` tokens that
begin there. So all places where a sequence occurs are next to each other, sorted by what follows.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from decode.base.errors import UserError
from decode.model.memory import free_bytes

TOKENS, SUFFIXES = "tokens.npy", "suffixes.npy"
END = 0  # stands after each document
SORTED_TOKENS = 32
# The most suffixes that are sorted at once, and the bytes that each takes: its place, its key, its
# group, their order, and copies of these in the new order.
SORTED_AT_ONCE = 2**25
SORT_BYTES = 72
SCANNED_AT_ONCE = 2**20  # tokens
SAMPLES = 256  # suffixes for each part, from which the limits of the parts are chosen


def memory_to_sort(tokens: int) -> int:
    """The bytes of memory that sorting the suffixes of this number of tokens takes."""
    return SORT_BYTES * min(tokens, SORTED_AT_ONCE)


def require_memory_to_sort(tokens: int) -> None:
    """Raises UserError if the suffixes of this number of tokens cannot be sorted in the free
    memory."""
    _require_free(
        memory_to_sort(tokens),
        f"sorting the suffixes of {tokens:,} tokens",
        "free some memory, or take less text. "
        f"{memory_to_sort(SORTED_AT_ONCE) / 1e9:.2f} GB are enough for most texts of any length",
    )


def _require_free(needed: int, what: str, advice: str) -> None:
    free = free_bytes(torch.device("cpu"))
    if free is not None and needed > free:
        raise UserError(
            f"{what} takes {needed / 1e9:.2f} GB of memory, and {free / 1e9:.2f} GB are free; "
            f"{advice}"
        )


def write_datastore(directory: Path, documents: Iterable[Sequence[int] | np.ndarray]) -> None:
    """Write both files. documents: token ids. They are read twice, one at a time, so that they need
    not be in memory; neither need the files. Raises UserError if the documents are empty, or if
    the memory to sort their suffixes is not free."""
    count = total = highest = 0
    for document in documents:
        count, total = count + len(document), total + len(document) + 1
        highest = max(highest, int(np.max(document, initial=0)))
    if not count:
        raise UserError("the text of the datastore is empty; name a text with at least one token")
    require_memory_to_sort(total)
    dtype = np.uint16 if highest + 1 < 2**16 else np.uint32
    tokens = np.lib.format.open_memmap(directory / TOKENS, "w+", dtype, (total,))
    begin = 0
    for document in documents:
        end = begin + len(document)
        tokens[begin:end] = np.asarray(document, dtype=np.int64) + 1
        tokens[end] = END
        begin = end + 1
    tokens.flush()
    place_dtype = np.int32 if total < 2**31 else np.int64
    suffixes = np.lib.format.open_memmap(directory / SUFFIXES, "w+", place_dtype, (count,))
    begin = 0
    for part in sorted_suffixes(np.asarray(tokens), SORTED_TOKENS, SORTED_AT_ONCE):
        suffixes[begin : begin + len(part)] = part
        begin += len(part)
    suffixes.flush()


def sorted_suffixes(tokens: np.ndarray, length: int, at_once: int) -> Iterator[np.ndarray]:
    """The places of all tokens, part by part, int64 each, sorted by the tokens that begin there: by
    `length` of them or more. Past the end are zeros. Equal ones stay in the order of the text.

    tokens: uint16 or uint32 [n]. No suffix begins with `END`. A part has about `at_once` places at
    most. It is a range of keys, the first 8 bytes of a suffix, and takes one scan of all tokens.
    Suffixes with one key are never parted, so a text that says the same over and over takes more
    memory. Raises UserError if that is not free.
    """
    count = -(-len(tokens) // at_once)
    limits = np.zeros(0, dtype=np.uint64)
    if count > 1:
        sampled = np.linspace(0, len(tokens) - 1, SAMPLES * count, dtype=np.int64)
        keys = np.sort(_keys(tokens, sampled))
        # A tenth smaller than asked for: a sample only estimates how many suffixes a range has.
        steps = np.arange(1, count + count // 10 + 1) / (count + count // 10 + 1)
        limits = np.unique(keys[(steps * len(keys)).astype(np.int64)])
    for low, high in zip([None, *limits], [*limits, None], strict=True):
        places = _places_between(tokens, low, high)
        if len(places) > at_once:
            _require_free(
                SORT_BYTES * len(places),
                f"sorting {len(places):,} places of the text that begin alike",
                "free some memory, or drop what the text repeats",
            )
        if len(places):
            yield _sorted_places(tokens, places, length)


def _keys(tokens: np.ndarray, places: np.ndarray) -> np.ndarray:
    """uint64 [n]: the first 8 bytes of the suffixes at these places, the first token highest."""
    keys = np.zeros(len(places), dtype=np.uint64)
    bits = np.uint64(8 * tokens.itemsize)
    for offset in range(8 // tokens.itemsize):
        at = places + offset
        inside = at < len(tokens)
        keys <<= bits
        keys |= np.where(inside, tokens[np.where(inside, at, 0)], 0).astype(np.uint64)
    return keys


def _places_between(
    tokens: np.ndarray, low: np.uint64 | None, high: np.uint64 | None
) -> np.ndarray:
    """int64: the places, in order, of suffixes with low ≤ key < high. None: no limit."""
    parts = []
    for begin in range(0, len(tokens), SCANNED_AT_ONCE):
        places = np.arange(begin, min(begin + SCANNED_AT_ONCE, len(tokens)))
        places = places[tokens[places] != END]
        if low is not None or high is not None:
            keys = _keys(tokens, places)
            places = places[(low is None or keys >= low) & (high is None or keys < high)]
        parts.append(places)
    return np.concatenate(parts)


def _sorted_places(tokens: np.ndarray, places: np.ndarray, length: int) -> np.ndarray:
    """int64 [n]: these places, sorted by the `length` tokens that begin there.

    They are sorted by their keys. Then groups with equal keys are sorted by the next 8 bytes, and
    so on. A group is known by the index of its first member.
    """
    keys = _keys(tokens, places)
    order = np.argsort(keys, kind="stable")
    places, keys = places[order], keys[order]
    del order
    tied, groups = np.arange(len(places)), np.zeros(len(places), dtype=np.int64)
    for depth in range(8 // tokens.itemsize, length, 8 // tokens.itemsize):
        begins = np.ones(len(tied) + 1, dtype=bool)
        begins[1:-1] = (keys[1:] != keys[:-1]) | (groups[1:] != groups[:-1])
        alone = begins[:-1] & begins[1:]
        groups = np.maximum.accumulate(np.where(begins[:-1], tied, 0))[~alone]
        tied = tied[~alone]
        if not len(tied):
            break
        keys = _keys(tokens, places[tied] + depth)
        order = np.lexsort((keys, groups))
        places[tied], keys = places[tied[order]], keys[order]
    return places


class Datastore:
    """A datastore's files, mapped into memory: only pages that are looked at are read.

    Raises UserError if the files do not fit together.
    """

    def __init__(self, directory: Path) -> None:
        mapped = [
            np.load(directory / name, mmap_mode="r", allow_pickle=False)
            for name in (TOKENS, SUFFIXES)
        ]
        # Slices of a plain array take half the time of those of a memory map.
        self.tokens, self.suffixes = (np.asarray(array) for array in mapped)
        ended = len(self.tokens) > 0 and self.tokens[-1] == END
        if not ended or not 0 < len(self.suffixes) < len(self.tokens):
            raise UserError(
                f"{directory}: {TOKENS} has {len(self.tokens)} tokens and {SUFFIXES} "
                f"{len(self.suffixes)} suffixes; expected the files of one datastore. Make it again"
            )

    def longest(self, end: Sequence[int], least: int) -> tuple[int, int, int]:
        """The longest end of a text that occurs: (its number of tokens, and the first and one past
        the last of its places in `suffixes`). (0, 0, 0): no end of at least `least` tokens occurs.

        end: the last tokens of the text, at most `SORTED_TOKENS`. If an end occurs, every shorter
        one does, so the length is found by bisection.
        """
        best, low, high = (0, 0, 0), least, len(end)
        while low <= high:
            count = (low + high) // 2
            first, last = self._places(end[-count:])
            if first < last:
                best, low = (count, first, last), count + 1
            else:
                high = count - 1
        return best

    def continuations(self, places: np.ndarray, skip: int, length: int) -> np.ndarray:
        """int64 [H, length]: the tokens after the first `skip` ones at some places of `suffixes`,
        int [H]. Rows are sorted, if `places` is. −1 stands for no token: the document has ended."""
        begin = self.suffixes[places].astype(np.int64)[:, None] + skip
        index = np.minimum(begin + np.arange(length), len(self.tokens) - 1)
        return self.tokens[index].astype(np.int64) - 1

    def _places(self, sequence: Sequence[int]) -> tuple[int, int]:
        stored, count = [token + 1 for token in sequence], len(sequence)

        def tokens_at(place: int) -> list[int]:
            begin = int(self.suffixes[place])
            at: list[int] = self.tokens[begin : begin + count].tolist()
            return at

        order = range(len(self.suffixes))
        first = bisect_left(order, stored, key=tokens_at)
        return first, bisect_right(order, stored, lo=first, key=tokens_at)
