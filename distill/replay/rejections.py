"""Records the target's distributions from verification passes, without another teacher forward.

Shapes: B rows, N draft nodes, D depth of the longest accepted path, V vocabulary, n recorded
tokens, k most likely tokens.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from decode.verification import Verified
from distill.replay.replay_buffer import LEAST, Drafted, Record, to_numpy
from distill.teacher.top_k_cache import top_k

# The number of float32 distributions whose log-softmax is computed at once.
CHUNK = 64


@dataclass
class _Open:
    """A request that is still being generated."""

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
    """An observer of the loop (`decode.verification`) that records the target's distributions.

    It records every position where a draft token was rejected. Of the other emitted tokens it
    records a random share `accepted`. These are accepted tokens, and the target's own token if
    nothing was drafted or the whole draft was accepted.

    Every `holdout_every`-th request is held out (0: none). It is not used for training, and all of
    its tokens are recorded, because an evaluation must not see only the drafter's failures.

    Distributions are the target's at temperature 1, before all processors: the k most likely tokens
    and the tail. With a draft `vocabulary`, int64 [V'] ascending, they are renormalised over it.
    Otherwise they cover the first `vocab_size` rows, because later rows are padding. k ≥ V keeps
    the full distribution.

    captured_layers: for heads on the target, the layers whose hidden states are captured. Then only
    positions for which a head drafted are recorded, with the number of the head and the hidden
    states that it read. After a text of L tokens, head d drafts for position L + d − 1 from the
    hidden states of the token at L − 2.

    Each row of a decode is a request. A new request begins if the text of a row does not continue
    the text before. `begin` sets the request numbers for the rows of the next decode. Without it,
    requests are counted. The random draws of a text depend only on its request number, so they are
    the same in any batch. A row keeps its records until `take`: at most
    `distill.replay.replay_buffer.bytes_per_position` per emitted token. Calls from several threads
    wait for each other.
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
        captured_layers: Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        self.vocabulary, self.captured_layers = vocabulary, tuple(captured_layers)
        self.vocab_size = vocab_size
        self.k = min(k, vocab_size if vocabulary is None else len(vocabulary))
        self._ids = np.uint16 if vocab_size <= 1 << 16 else np.int32
        self.accepted, self.holdout_every, self.seed = accepted, holdout_every, seed
        self._eos = np.array(sorted(eos_token_ids), dtype=np.int64)
        self._open: dict[int, _Open] = {}
        self._closed: list[tuple[bool, Record]] = []
        self._numbers: Sequence[int] | None = None
        self._lock = threading.Lock()
        self.requests = 0  # requests started so far
        self.rejections = 0  # rejections recorded for training

    def begin(self, requests: Sequence[int]) -> None:
        """Set the request numbers for the rows of the next decode. All other requests end."""
        with self._lock:
            self._close()
            self._numbers = list(requests)

    def take(self) -> tuple[list[Record], list[Record]]:
        """Return the records since the last call: those for training and those held out.

        Unfinished texts continue. Their later records contain the full context again.
        """
        with self._lock:
            for row in self._open.values():
                self._record(row)
            taken, self._closed = self._closed, []
        return [r for held, r in taken if not held], [r for held, r in taken if held]

    def end(self) -> None:
        """Close all texts as complete."""
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
        # A text ends at its first EOS, even if tokens after it were accepted.
        over = np.isin(seen.block, self._eos).cumsum(1) - np.isin(seen.block, self._eos) > 0
        emitted = (columns <= accepted[:, None]) & ~over
        reached = seen.verdict.reached.cpu().numpy()
        # The position after the accepted tokens is a rejection if one more token was verified.
        rejected = emitted & (columns == accepted[:, None]) & (reached > accepted)[:, None]
        drawn = np.stack([row.random.random(depth) for row in rows])
        shares = np.array([1.0 if row.held_out else self.accepted for row in rows])
        others = emitted & (columns < accepted[:, None]) if self.captured_layers else emitted
        picked = np.nonzero(rejected | (others & (drawn < shares[:, None])))
        ids, log_p, tail = self._distributions(seen, *picked)
        for at, (place, column) in enumerate(zip(*picked, strict=True)):
            row = rows[place]
            row.places.append(int(lengths[place] + column))
            row.rejected.append(bool(rejected[place, column]))
            row.signals.append((ids[at], log_p[at], tail[at]))
            self.rejections += bool(rejected[place, column]) and not row.held_out
            if self.captured_layers:
                row.depths.append(int(column) + 1)
        if self.captured_layers and len(picked[0]):
            assert seen.read is not None, "a draft by heads follows hidden states"
            drafted = np.unique(picked[0])
            newest = seen.read.newest(self.captured_layers)
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
        """Return ids [n, k], log_p float16 [n, k] and log_tail float32 [n].

        rows, columns: rows of the batch and positions on the accepted path.
        """
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
        """Turn the recorded tokens of a row into a record."""
        if not row.places:
            return
        ids, log_p, tail = (np.stack(parts) for parts in zip(*row.signals, strict=True))
        drafted = None
        if self.captured_layers:
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
