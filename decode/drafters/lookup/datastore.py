"""Documents as tokens with a suffix array, in files that are mapped into memory.

`tokens.npy` holds all documents one after the other, each with a 0 after it: token t is stored as
t + 1. `suffixes.npy` holds the positions of all tokens, sorted by the `SORTED_TOKENS` tokens that
begin there. So all places where a sequence occurs are next to each other, sorted by what follows.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from decode.errors import UserError
from decode.target.memory import free_bytes

TOKENS, SUFFIXES = "tokens.npy", "suffixes.npy"
END = 0  # stands after each document
SORTED_TOKENS = 32
# Bytes per token while suffixes are sorted: ranks, keys, their order, and the keys in that order.
SORT_BYTES = 40


def require_memory_to_sort(tokens: int) -> None:
    """Raises UserError if the suffixes of so many tokens cannot be sorted in the free memory."""
    free = free_bytes(torch.device("cpu"))
    needed = SORT_BYTES * tokens
    if free is not None and needed > free:
        raise UserError(
            f"sorting the suffixes of {tokens:,} tokens takes {needed / 1e9:.2f} GB "
            f"({SORT_BYTES} bytes per token), and {free / 1e9:.2f} GB are free; take less text, or "
            "a machine with more memory. A finished datastore needs no memory of this size"
        )


def write_datastore(directory: Path, documents: Iterable[Sequence[int] | np.ndarray]) -> None:
    """Write both files. documents: token ids. They are read twice, one at a time, so that they need
    not be in memory. Raises UserError if the documents are empty, or too large to sort in
    memory."""
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
    suffixes = sorted_suffixes(np.asarray(tokens), SORTED_TOKENS)
    suffixes = suffixes[tokens[suffixes] != END]
    np.save(directory / SUFFIXES, suffixes.astype(np.int32 if total < 2**31 else np.int64))


def sorted_suffixes(tokens: np.ndarray, length: int) -> np.ndarray:
    """int64 [n]: the positions in `tokens`, int [n], sorted by the tokens that begin there: by
    `length` of them or more. Past the end are zeros.

    Ranks by the first 1, 2, 4, … tokens: two ranks next to each other rank twice the length
    (Manber and Myers, 1993). Each round is one sort.
    """
    rank = tokens.astype(np.int64)
    order, ranked = np.argsort(rank, kind="stable"), 1
    while ranked < length:
        key = rank * (int(rank.max()) + 1)
        key[:-ranked] += rank[ranked:]
        order = np.argsort(key, kind="stable")
        key = key[order]
        rank[order[0]] = 0
        rank[order[1:]] = np.cumsum(key[1:] != key[:-1])
        ranked *= 2
        if rank[order[-1]] == len(tokens) - 1:  # all differ
            break
    return order


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
        ends = int(np.count_nonzero(self.tokens[-1:] == END))
        if not ends or not 0 < len(self.suffixes) < len(self.tokens):
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
