"""Records the target's distributions from verification passes, without another teacher forward.

Shapes: B rows, N draft nodes, D depth of the longest accepted path, V vocabulary, n recorded
tokens, k most likely tokens.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from decode.verification import Verification
from distill.replay.replay_buffer import MIN_LOG_P, HeadDrafts, Record, to_numpy
from distill.teacher.top_k_cache import top_k

# The number of float32 distributions whose log-softmax is computed at once.
CHUNK = 64


@dataclass
class _OpenRequest:
    """A request that is still being generated."""

    number: int
    held_out: bool
    random: np.random.Generator
    text: list[int]
    positions: list[int] = field(default_factory=list)
    rejected: list[bool] = field(default_factory=list)
    signals: list[tuple[np.ndarray, ...]] = field(default_factory=list)  # ids, log_p, log_tail
    depths: list[int] = field(default_factory=list)
    read_positions: list[int] = field(default_factory=list)
    features: list[np.ndarray] = field(default_factory=list)
    states: int = 0  # in `features`, of a text from its first token on


def _is_text(request: _OpenRequest, text: np.ndarray) -> bool:
    return request.text == text.tolist()


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
    hidden states of the token at L − 2. text_states: for heads that attend to the text, a function
    from the index of a row to the states of its text of L tokens, [L − 1, H]. Then a record has
    those of all of its tokens but the last recorded one instead. EAGLE-1's regression reads the
    last of them.

    Each row of a decode is a request. A new request begins if the text of a row does not continue
    the text before. `begin` sets the request numbers for the rows of the next decode. Without it,
    requests are counted. The random draws of a text depend only on its request number, so they are
    the same in any batch. A row keeps its records until `take`: at most
    `distill.replay.replay_buffer.bytes_per_position` per emitted token. Calls from several threads
    wait for each other.

    chosen: only rows that `join` names are recorded, until they `leave`. Otherwise all rows are. A
    decode that runs on and on tells of every row that leaves, or its text is kept until `end`.
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
        text_states: Callable[[int], Tensor] | None = None,
        seed: int = 0,
        chosen: bool = False,
    ) -> None:
        self.vocabulary, self.captured_layers = vocabulary, tuple(captured_layers)
        self.vocab_size, self._text_states = vocab_size, text_states
        self.k = min(k, vocab_size if vocabulary is None else len(vocabulary))
        self._id_dtype = np.uint16 if vocab_size <= 1 << 16 else np.int32
        self.accepted, self.holdout_every, self.seed = accepted, holdout_every, seed
        self._eos = np.array(sorted(eos_token_ids), dtype=np.int64)
        self._open_requests: dict[int, _OpenRequest] = {}
        self._closed: list[tuple[bool, Record]] = []
        self._numbers: Sequence[int] | None = None
        self._rows: set[int] | None = set() if chosen else None  # None: all
        self._tokens: weakref.ref[np.ndarray] | None = None  # the loop's array in the last pass
        self._lock = threading.Lock()
        self.requests = 0  # requests started so far
        self.rejections = 0  # rejections recorded for training

    def begin(self, requests: Sequence[int]) -> None:
        """Set the request numbers for the rows of the next decode. All other requests end."""
        with self._lock:
            self._close()
            self._numbers = list(requests)

    def join(self, row: int) -> None:
        """Record this row from now on, if only chosen rows are."""
        with self._lock:
            if self._rows is not None:
                self._rows.add(row)

    def leave(self, row: int) -> None:
        """A row gets no more passes. Keep only the record of its text, until `take`."""
        with self._lock:
            if self._rows is not None:
                self._rows.discard(row)
            request = self._open_requests.pop(row, None)
            if request is not None:
                self._record(request)

    def take(self, *, ended: bool = False) -> tuple[list[Record], list[Record]]:
        """Return the records since the last call: those for training and those held out.

        Unfinished texts continue. Their later records contain the full context again. ended: take
        no records of unfinished texts.
        """
        with self._lock:
            for request in () if ended else self._open_requests.values():
                self._record(request)
            taken, self._closed = self._closed, []
        training = [record for held_out, record in taken if not held_out]
        return training, [record for held_out, record in taken if held_out]

    def end(self) -> None:
        """Close all texts as complete."""
        with self._lock:
            self._close()
            self._numbers = None

    def __call__(self, verification: Verification) -> None:
        with self._lock:
            self._observe(verification)

    def _observe(self, verification: Verification) -> None:
        lengths, accepted = verification.lengths, verification.accepted
        tokens = verification.contexts.tokens
        # The loop appends to its array in place. In one that was seen before, each row has the text
        # that it had: comparing whole texts in every pass would cost their length squared.
        known = self._tokens is not None and self._tokens() is tokens
        self._tokens = weakref.ref(tokens)
        requests = {
            b: self._request(row, tokens[b, : lengths[b]], known)
            for b, row in enumerate(verification.rows.tolist())
            if (self._rows is None or row in self._rows)
            # A row that sat the pass out got no token of it.
            and not verification.sits_out[b]
        }
        if not requests:
            return
        depth = verification.block.shape[1]
        columns = np.arange(depth)
        # A text ends at its first EOS, even if tokens after it were accepted.
        is_eos = np.isin(verification.block, self._eos)
        emitted = (columns <= accepted[:, None]) & (is_eos.cumsum(1) - is_eos == 0)
        emitted &= ~verification.broken[:, None]
        draws, shares = np.ones((len(lengths), depth)), np.zeros(len(lengths))
        for b, request in requests.items():
            draws[b] = request.random.random(depth)
            shares[b] = 1.0 if request.held_out else self.accepted
        emitted[[b for b in range(len(lengths)) if b not in requests]] = False
        # The position after the accepted tokens is a rejection if one more token was judged.
        rejected = (
            emitted & (columns == accepted[:, None]) & (verification.reached > accepted)[:, None]
        )
        candidates = emitted & (columns < accepted[:, None]) if self.captured_layers else emitted
        recorded = np.nonzero(rejected | (candidates & (draws < shares[:, None])))
        ids, log_p, tail = self._distributions(verification, *recorded)
        for i, (b, column) in enumerate(zip(*recorded, strict=True)):
            request = requests[b]
            request.positions.append(int(lengths[b] + column))
            request.rejected.append(bool(rejected[b, column]))
            request.signals.append((ids[i], log_p[i], tail[i]))
            self.rejections += bool(rejected[b, column]) and not request.held_out
            if self.captured_layers:
                request.depths.append(int(column) + 1)
        if self.captured_layers and self._text_states is None and len(recorded[0]):
            assert verification.previous_features is not None, (
                "a draft by heads follows hidden states"
            )
            recorded_rows = np.unique(recorded[0])
            newest = verification.previous_features.newest(self.captured_layers)
            features = to_numpy(newest[torch.as_tensor(recorded_rows, device=newest.device)])
            for i, b in enumerate(recorded_rows):
                requests[b].read_positions.append(int(lengths[b]) - 2)
                requests[b].features.append(features[i])
        for b, request in requests.items():
            request.text += verification.block[b, : accepted[b] + 1].tolist()
            if self._text_states is not None:
                states = self._text_states(b)[request.states :]
                request.features.append(to_numpy(states))
                request.states += len(states)

    def _request(self, row: int, text: np.ndarray, known: bool) -> _OpenRequest:
        """The open request of a row of the decode: the same as before, if `text` continues it.
        known: it does if it is as long."""
        request = self._open_requests.get(row)
        if request is not None:
            if len(request.text) == len(text) and (known or _is_text(request, text)):
                return request
            self._record(request)
        number = self.requests if self._numbers is None else self._numbers[row]
        self.requests += 1
        held_out = self.holdout_every > 0 and number % self.holdout_every == 0
        random = np.random.default_rng([self.seed, number])
        self._open_requests[row] = _OpenRequest(number, held_out, random, text.tolist())
        return self._open_requests[row]

    def _distributions(
        self, verification: Verification, rows: np.ndarray, columns: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ids [n, k], log_p float16 [n, k] and log_tail float32 [n].

        rows, columns: rows of the batch and positions on the accepted path.
        """
        raw = verification.scores.raw
        rows_n = torch.as_tensor(rows, device=raw.device)
        nodes = verification.positions[rows_n, torch.as_tensor(columns, device=raw.device)]
        kept = slice(self.vocab_size) if self.vocabulary is None else self.vocabulary
        signals = []
        for begin in range(0, len(rows), CHUNK):
            part = slice(begin, begin + CHUNK)
            signal = top_k(raw[rows_n[part], nodes[part]][:, kept], self.k)
            signals.append(
                (
                    signal.ids.cpu().numpy().astype(self._id_dtype),
                    signal.log_p.clamp(min=MIN_LOG_P).half().cpu().numpy(),
                    signal.log_tail.float().cpu().numpy(),
                )
            )
        if not signals:
            empty = np.zeros((0, self.k), dtype=np.float16)
            return empty.astype(self._id_dtype), empty, np.zeros(0, dtype=np.float32)
        ids, log_p, tail = (np.concatenate(parts) for parts in zip(*signals, strict=True))
        return ids, log_p, tail

    def _record(self, request: _OpenRequest) -> None:
        """Turn the recorded tokens of a request into a record."""
        if not request.positions:
            return
        ids, log_p, tail = (np.stack(parts) for parts in zip(*request.signals, strict=True))
        head_drafts = None
        if self.captured_layers:
            read, features = self._read(request)
            head_drafts = HeadDrafts(np.array(request.depths, dtype=np.uint8), read, features)
        record = Record(
            request.number,
            np.array(request.text[: request.positions[-1] + 1], dtype=np.int32),
            np.array(request.positions, dtype=np.int32),
            np.array(request.rejected),
            ids,
            log_p,
            tail,
            head_drafts,
        )
        self._closed.append((request.held_out, record))
        request.positions, request.rejected, request.signals = [], [], []
        request.depths = []
        if self._text_states is None:
            request.read_positions, request.features = [], []

    def _read(self, request: _OpenRequest) -> tuple[np.ndarray | None, np.ndarray]:
        """`read_positions` and `features` of a request's `HeadDrafts`."""
        if self._text_states is None:
            return np.array(request.read_positions, dtype=np.int32), np.stack(request.features)
        states = np.concatenate(request.features)
        request.features = [states]
        return None, states[: request.positions[-1]].copy()

    def _close(self) -> None:
        for request in self._open_requests.values():
            self._record(request)
        self._open_requests.clear()
