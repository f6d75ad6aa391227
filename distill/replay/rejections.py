"""From verification passes to records of what the target said: no second forward of the teacher.

Shapes: B rows, N drafted nodes, D depth of the longest accepted path, V vocabulary, n recorded
tokens, k likeliest tokens.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from decode.observe import Verified
from distill.replay.buffer import LEAST, Drafted, Record, to_numpy
from distill.teacher.top_k_cache import top_k

# Distributions whose logarithm is taken together, float32 each.
CHUNK = 64


@dataclass
class _Open:
    """A request whose text is still growing."""

    request: int
    held_out: bool
    random: np.random.Generator
    text: list[int]
    places: list[int] = field(default_factory=list)
    rejected: list[bool] = field(default_factory=list)
    signals: list[tuple[np.ndarray, ...]] = field(default_factory=list)  # ids, log_p, log_tail
    depths: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    features: list[np.ndarray] = field(default_factory=list)


class Collector:
    """An observer of the decode loop (`decode.observe`) that records the target's distributions.

    Recorded are all places where a drafted token was rejected, and of the other tokens that a pass
    emitted (an accepted one; the target's own, where nothing was drafted or all was accepted) a
    share of `accepted`. Every `holdout_every`-th request is held out: not to be learnt from, but
    recorded whole, as what the drafter is judged on must not be its failures alone; 0: none.
    Distributions are the target's at temperature 1 before all processors, its k likeliest tokens
    and the tail; over the draft `vocabulary`, int64 [V'] ascending, renormalised, where one is
    given, else over the first `vocab_size` rows, as others are padding. k ≥ V keeps all of them.

    taps: of heads on the target, the hidden states that they read: then recorded are only places
    that a head drafted for, with its number and what it read there. The head d of a draft after L
    tokens drafts for place L + d − 1, from the hidden states of the token at L − 2.

    A row of a decode is a request, which begins where a row's text does not go on. `begin` gives
    the rows of the next decode their requests' numbers; else they are counted. What a text draws
    hangs on its request's number alone, so it is the same in any batch. Until `take` a row holds
    what was recorded of it, at most `distill.replay.buffer.bytes_per_position` for each token it
    emitted. Calls from several threads wait for each other.
    """

    def __init__(
        self,
        k: int,
        vocab_size: int,
        *,
        accepted: float = 0.0,
        holdout_every: int = 0,
        vocabulary: Tensor | None = None,
        eos_token_ids: Sequence[int] = (),
        taps: Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        self.vocabulary, self.taps = vocabulary, tuple(taps)
        self.vocab_size = vocab_size
        self.k = min(k, vocab_size if vocabulary is None else len(vocabulary))
        self._ids = np.uint16 if vocab_size <= 1 << 16 else np.int32
        self.accepted, self.holdout_every, self.seed = accepted, holdout_every, seed
        self._eos = np.array(sorted(eos_token_ids), dtype=np.int64)
        self._open: dict[int, _Open] = {}
        self._closed: list[tuple[bool, Record]] = []
        self._numbers: Sequence[int] | None = None
        self._lock = threading.Lock()
        self.requests = 0  # that have begun
        self.rejections = 0  # recorded to learn from

    def begin(self, requests: Sequence[int]) -> None:
        """The rows of the next decode answer these requests; all others are over."""
        with self._lock:
            self._close()
            self._numbers = list(requests)

    def take(self) -> tuple[list[Record], list[Record]]:
        """What was recorded since the last call, to learn from and held out. Texts that are still
        growing go on: what is recorded of them later comes with their whole context again."""
        with self._lock:
            for row in self._open.values():
                self._record(row)
            taken, self._closed = self._closed, []
        return [r for held, r in taken if not held], [r for held, r in taken if held]

    def end(self) -> None:
        """All texts are complete."""
        with self._lock:
            self._close()
            self._numbers = None

    def __call__(self, seen: Verified) -> None:
        with self._lock:
            self._observe(seen)

    def _observe(self, seen: Verified) -> None:
        lengths, accepted = seen.contexts.lengths, seen.accepted
        rows = [
            self._row(int(row), seen.contexts.tokens[place, : lengths[place]])
            for place, row in enumerate(seen.rows)
        ]
        depth = seen.block.shape[1]
        columns = np.arange(depth)
        # A text is over at its first EOS, whatever was accepted behind it.
        over = np.isin(seen.block, self._eos).cumsum(1) - np.isin(seen.block, self._eos) > 0
        emitted = (columns <= accepted[:, None]) & ~over
        reached = seen.verdict.reached.cpu().numpy()
        # The place after the accepted tokens is a rejection's where one more was judged.
        rejected = emitted & (columns == accepted[:, None]) & (reached > accepted)[:, None]
        drawn = np.stack([row.random.random(depth) for row in rows])
        shares = np.array([1.0 if row.held_out else self.accepted for row in rows])
        others = emitted & (columns < accepted[:, None]) if self.taps else emitted
        picked = np.nonzero(rejected | (others & (drawn < shares[:, None])))
        ids, log_p, tail = self._distributions(seen, *picked)
        for at, (place, column) in enumerate(zip(*picked, strict=True)):
            row = rows[place]
            row.places.append(int(lengths[place] + column))
            row.rejected.append(bool(rejected[place, column]))
            row.signals.append((ids[at], log_p[at], tail[at]))
            self.rejections += bool(rejected[place, column]) and not row.held_out
            if self.taps:
                row.depths.append(int(column) + 1)
        if self.taps and len(picked[0]):
            assert seen.read is not None, "a draft by heads follows hidden states"
            drafted = np.unique(picked[0])
            newest = seen.read.newest(self.taps)
            features = to_numpy(newest[torch.as_tensor(drafted, device=newest.device)])
            for at, place in enumerate(drafted):
                rows[place].read.append(int(lengths[place]) - 2)
                rows[place].features.append(features[at])
        for place, row in enumerate(rows):
            row.text += seen.block[place, : accepted[place] + 1].tolist()

    def _row(self, number: int, text: np.ndarray) -> _Open:
        row = self._open.get(number)
        if row is not None and row.text == text.tolist():
            return row
        if row is not None:
            self._record(row)
        request = self.requests if self._numbers is None else self._numbers[number]
        self.requests += 1
        held_out = self.holdout_every > 0 and request % self.holdout_every == 0
        random = np.random.default_rng([self.seed, request])
        self._open[number] = _Open(request, held_out, random, text.tolist())
        return self._open[number]

    def _distributions(
        self, seen: Verified, rows: np.ndarray, columns: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """ids [n, k], log_p float16 [n, k], log_tail float32 [n] at these columns of the path."""
        raw = seen.scores.raw
        which = torch.as_tensor(rows, device=raw.device)
        places = seen.verdict.places()[which, torch.as_tensor(columns, device=raw.device)]
        found = []
        for begin in range(0, len(rows), CHUNK):
            part = slice(begin, begin + CHUNK)
            logits = raw[which[part], places[part]]
            kept = slice(self.vocab_size) if self.vocabulary is None else self.vocabulary
            logits = logits[:, kept]
            few = top_k(logits, self.k)
            found.append(
                (
                    few.ids.cpu().numpy().astype(self._ids),
                    few.log_p.clamp(min=LEAST).half().cpu().numpy(),
                    few.log_tail.float().cpu().numpy(),
                )
            )
        if not found:
            none = np.zeros((0, self.k), dtype=np.float16)
            return none.astype(self._ids), none, np.zeros(0, dtype=np.float32)
        ids, log_p, tail = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return ids, log_p, tail

    def _record(self, row: _Open) -> None:
        """Close what was recorded of a row so far."""
        if not row.places:
            return
        ids, log_p, tail = (np.stack(parts) for parts in zip(*row.signals, strict=True))
        drafted = None
        if self.taps:
            depths, read = np.array(row.depths, dtype=np.uint8), np.array(row.read, dtype=np.int32)
            drafted = Drafted(depths, read, np.stack(row.features))
        record = Record(
            row.request,
            np.array(row.text[: row.places[-1] + 1], dtype=np.int32),
            np.array(row.places, dtype=np.int32),
            np.array(row.rejected),
            ids,
            log_p,
            tail,
            drafted,
        )
        self._closed.append((row.held_out, record))
        row.places, row.rejected, row.signals = [], [], []
        row.depths, row.read, row.features = [], [], []

    def _close(self) -> None:
        for row in self._open.values():
            self._record(row)
        self._open.clear()
