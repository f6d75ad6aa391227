"""Drafters that look up n-grams: in the row's own text, and in a store kept across requests."""

from collections import OrderedDict
from collections.abc import Sequence
from types import MappingProxyType

import numpy as np
import torch

from decode.base.errors import UserError, require_whole
from decode.draft import Contexts
from decode.drafters import DRAFTERS
from decode.drafters.lookup.lookup_tree import LookupDrafter, LookupTree
from decode.draw.top import top
from decode.verification import Verification

LONGEST_NGRAM = 64


def continuation(text: np.ndarray, min_n: int, max_n: int, count: int) -> tuple[list[int], int]:
    """At most `count` tokens that follow the last earlier match of the longest end of a text that
    was there before, of min_n … max_n tokens, and the length of that end; [], 0: there is none.

    text: int64 [L]. All of it is compared with its last token, which takes microseconds for
    thousands of tokens; an index would take as long for each of them when they are read.
    """
    longest, place = 0, 0
    ends = np.flatnonzero(text[:-1] == text[-1]) + 1 if len(text) else np.zeros(0, dtype=np.int64)
    for n in range(1, max_n + 1):
        if n > 1:  # those that match one token more
            ends = ends[ends >= n]
            ends = ends[text[ends - n] == text[-n]]
        if not len(ends):
            break
        if n >= min_n:
            longest, place = n, int(ends[-1])
    return (text[place : place + count].tolist() if longest else []), longest


def require_sizes(min_n: int, max_n: int, longest: int = LONGEST_NGRAM) -> None:
    """Raises UserError unless 1 ≤ min_n ≤ max_n ≤ longest."""
    if not 1 <= min_n <= max_n <= longest:
        raise UserError(
            f"n-gram sizes min_n={min_n}, max_n={max_n}; expected 1 ≤ min_n ≤ max_n ≤ {longest}"
        )


@DRAFTERS.register("ngram")
class NgramDrafter(LookupDrafter):
    """Looks up the last max_n … min_n tokens in the row's own context. Needs no training.

    For a target with an encoder, the context is the source and then the text. A row without a
    match drafts nothing. Raises UserError as `require_sizes`.
    """

    def __init__(self, min_n: int = 1, max_n: int = 3) -> None:
        require_sizes(min_n, max_n)
        self.min_n, self.max_n = min_n, max_n
        self._sources: list[np.ndarray] = []
        self.per_row = {"_sources": self._of_rows}

    def _of_rows(self, contexts: Contexts) -> list[np.ndarray]:
        sources = contexts.sources or [()] * len(contexts.lengths)
        return [np.array(source, dtype=np.int64) for source in sources]

    def look_up(self, row: int, text: np.ndarray, depth: int) -> LookupTree:
        if len(source := self._sources[row]):
            text = np.concatenate([source, text])
        return LookupTree.path(*continuation(text, self.min_n, self.max_n, depth))

    def rewind(self, lengths: np.ndarray) -> None:
        """Nothing of a text is kept."""


class NgramStore:
    """The tokens that followed each n-gram so far, with weights, for n in min_n … max_n.

    The store keeps at most `capacity` n-grams. Beyond that it drops the least recently used one;
    storing and looking up both count as use. An n-gram keeps its `width` heaviest tokens.
    """

    def __init__(self, min_n: int, max_n: int, capacity: int, width: int) -> None:
        self.sizes = range(max_n, min_n - 1, -1)
        self.capacity, self.width = capacity, width
        self._followers: OrderedDict[tuple[int, ...], dict[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._followers)

    def file(self, text: Sequence[int], tokens: Sequence[int]) -> None:
        """Stores tokens that may follow the end of a text, likeliest first. Token i adds weight
        1/(i+1)."""
        for n in self.sizes:
            if n > len(text):
                continue
            ending = tuple(text[-n:])
            known = self._followers.setdefault(ending, {})
            self._followers.move_to_end(ending)
            for rank, token in enumerate(tokens, 1):
                known[token] = known.get(token, 0.0) + 1 / rank
            while len(known) > self.width:
                # Of tokens with equal weight the oldest entry goes, so that new tokens can enter.
                del known[min(known, key=known.__getitem__)]
        while len(self._followers) > self.capacity:
            self._followers.popitem(last=False)

    def next(self, text: Sequence[int]) -> int | None:
        """The heaviest token after the longest known suffix of a text."""
        for n in self.sizes:
            ending = tuple(text[-n:])
            known = self._followers.get(ending) if n <= len(text) else None
            if known:
                self._followers.move_to_end(ending)
                return max(known, key=known.__getitem__)
        return None

    def clear(self) -> None:
        self._followers.clear()


@DRAFTERS.register("store")
class StoreDrafter(LookupDrafter):
    """Drafts a chain of the tokens that most often followed the last few, in any request so far.

    The store learns from the texts. It also learns from the target, after Adaptive N-gram Parallel
    Decoding (2404.08698) and NASD: after each accepted token it stores the target's `top_k`
    likeliest next tokens with weights 1, 1/2, 1/3 …, because a near miss here may be right
    elsewhere. The store is kept across requests. Its memory is bounded by `capacity` n-grams of at
    most `width` tokens, about 0.3 kB each (`NgramStore` describes which ones are dropped).

    Drafts depend on other rows and earlier requests. The text for a seed does not: drafts are
    chosen, and exact match judges them (`decode.loop.step.decided`). Raises UserError as
    `require_sizes`, and unless the other sizes are at least 1.
    """

    per_row = MappingProxyType({"_filed": 1})
    _filed: np.ndarray  # [B]: tokens of each text that are in the store

    def __init__(
        self,
        min_n: int = 2,
        max_n: int = 4,
        top_k: int = 3,
        capacity: int = 200_000,
        width: int = 8,
    ) -> None:
        require_sizes(min_n, max_n)
        require_whole(top_k=top_k, capacity=capacity, width=width)
        self.store = NgramStore(min_n, max_n, capacity, width)
        self.max_n, self.top_k = max_n, top_k

    def start(self, contexts: Contexts) -> None:
        super().start(contexts)
        self._file_sources(contexts)
        self._file_texts(contexts)

    def look_up(self, row: int, text: np.ndarray, depth: int) -> LookupTree:
        end = text[-self.max_n :].tolist()
        known = len(end)
        while len(end) < known + depth and (token := self.store.next(end)) is not None:
            end.append(token)
        return LookupTree.path(end[known:])

    def observe(self, verification: Verification) -> None:
        if verification.number:  # the prefill judged no draft
            self._file_likeliest(verification)
        self._file_texts(verification.contexts)

    def _file_likeliest(self, verification: Verification) -> None:
        """Store the target's likeliest tokens after the text and after each accepted token."""
        count = int(verification.accepted.max()) + 1
        logits = verification.scores.logits
        if verification.draft.is_chain:
            logits = logits[:, :count]  # no copy
        else:
            positions = verification.positions[:, :count]
            rows_B1 = torch.arange(len(positions), device=positions.device)[:, None]
            logits = logits[rows_B1, positions]
        likeliest = top(logits, min(self.top_k, logits.shape[-1]))[1].tolist()
        for row, length in enumerate(verification.lengths):
            if verification.broken[row] or verification.sits_out[row]:
                continue
            text = verification.contexts.tokens[row, max(length - self.max_n, 0) : length].tolist()
            known, accepted = len(text), int(verification.accepted[row])
            text += verification.block[row, :accepted].tolist()
            for place in range(accepted + 1):
                end = known + place
                self.store.file(text[max(end - self.max_n, 0) : end], likeliest[row][place])

    def _file_sources(self, contexts: Contexts) -> None:
        """Store what an encoder read, as the prompts of a model without an encoder are stored."""
        for source in contexts.sources or ():
            self._file_from(source, 1)

    def _file_texts(self, contexts: Contexts) -> None:
        """Store the tokens of the texts that are not stored yet."""
        ends = zip(self._filed.tolist(), contexts.lengths.tolist(), strict=True)
        for tokens, (filed, length) in zip(contexts.tokens, ends, strict=True):
            begin = max(filed - self.max_n, 0)
            self._file_from(tokens[begin:length].tolist(), filed - begin)
        self._filed = contexts.lengths.copy()

    def _file_from(self, text: Sequence[int], begin: int) -> None:
        """Store the tokens of a text from `begin` on, each after the tokens before it."""
        for end in range(begin, len(text)):
            self.store.file(text[max(end - self.max_n, 0) : end], text[end : end + 1])

    def rewind(self, lengths: np.ndarray) -> None:
        self._filed = np.minimum(self._filed, lengths)

    def forget(self) -> None:
        self.store.clear()

    def add_rows(self, contexts: Contexts, verification: Verification) -> None:
        self._file_sources(contexts.rows_from(len(self._filed)))
        super().add_rows(contexts, verification)
        self._file_texts(contexts)
