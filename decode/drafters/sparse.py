"""The target drafts over a part of its keys and values (the retrieval cache of TriForce,
2404.11912, section 4.1).

Shapes: B rows, R rows that choose, N query heads, K key heads, S slots of the target, M chunks of
a text, C chunks that are kept, W slots that are gathered, D head size.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.base.device import to_device
from decode.base.errors import UserError, require_whole
from decode.draft import Contexts, Draft, Limits
from decode.drafters import DRAFTERS
from decode.drafters.skip import SelfGrowth
from decode.drafters.trained import VerifyingDrafter
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.model.cache.cached_model import CachedLM, LayerView
from decode.model.cache.real_tokens import Listed
from decode.model.forward.attention_mask import AttentionMask
from decode.model.forward.prepare_model import Forward, watchable_forward
from decode.model.forward.sublayers import Sublayers
from decode.model.kinds.layer_kinds import layer_windows
from decode.shapes import Shape
from decode.verification import Verification


class PartLM(CachedLM):
    """The target with slots for a part of each text.

    omitted: int [B], how many tokens of each text have no slot here: those of the chunks that are
    not kept. All of them come before the last tokens of the text. So a token after them has the
    slot of the target minus `omitted`. Its position stays that of the text.
    """

    def __init__(self, lm: CachedLM) -> None:
        super().__init__(lm.model, pass_tokens=lm.pass_tokens)
        self.forward_pass = lm.forward_pass
        self.omitted = np.zeros(0, dtype=np.int64)

    def _feed(self, ids_BN: Tensor, start: np.ndarray, *more: Any, **settings: Any) -> Any:
        """See `CachedLM.forward`. start: int [B], the slots in the target."""
        return super()._feed(ids_BN, start - self.omitted, *more, **settings)

    def positions(self, base_B1: Tensor, depth_BN: Tensor) -> Tensor:
        omitted_B1 = to_device(self.omitted, self.device)[:, None]
        return super().positions(base_B1 + omitted_B1, depth_BN)


class WatchedLM(CachedLM):
    """The target, which calls `watch` for the attention of each layer, with the layer's number and
    the arguments of `attention_mask.Watch`."""

    watch: Callable[[int, Tensor, Tensor, Tensor, float], None]

    def _masks(self, *given: Any) -> list[AttentionMask]:
        return [
            AttentionMask(mask.visible, self.dtype, watch=partial(self.watch, layer))
            for layer, mask in enumerate(super()._masks(*given))
        ]


class SparseReader(WatchedLM, LayerView):
    """The target, whose queries choose. It reads the target's slots."""


@dataclass(frozen=True)
class KeptTokens:
    """Which tokens before a token at `turn` are kept, for one or many rows, int [B] each.

    The text is [sinks, chunks of `chunk` tokens, the rest]. kept: how many of the `chunks` chunks.
    """

    sinks: int
    chunk: int
    turn: np.ndarray
    chunks: np.ndarray
    kept: np.ndarray

    @property
    def omitted(self) -> np.ndarray:
        return (self.chunks - self.kept) * self.chunk

    def of_rows(self, rows: np.ndarray) -> "KeptTokens":
        """The same of some rows, int [R]."""
        return KeptTokens(
            self.sinks, self.chunk, self.turn[rows], self.chunks[rows], self.kept[rows]
        )

    def slots(self, chosen_RKC: Tensor) -> Tensor:
        """int64 [R, K, W]: the slots of the target that are kept, in the order of the text, and
        junk after them. chosen_RKC: the chunks, ascending."""
        device, sinks, size = chosen_RKC.device, self.sinks, self.chunk
        kept, omitted, turn = (
            to_device(x, device)[:, None, None] for x in (self.kept, self.omitted, self.turn)
        )
        width = int((self.turn - self.omitted).max(initial=0))
        slot = torch.arange(width, device=device).expand(*chosen_RKC.shape[:2], -1)
        place = (slot - sinks).clamp(min=0)
        number = (place // size).clamp(max=max(chosen_RKC.shape[2] - 1, 0))
        in_chunk = slot
        if chosen_RKC.shape[2]:
            in_chunk = sinks + chosen_RKC.gather(2, number) * size + place % size
        slot = torch.where(
            slot < sinks, slot, torch.where(place < kept * size, in_chunk, slot + omitted)
        )
        return slot.minimum(turn)


def choose_chunks(query: Tensor, key: Tensor, part: KeptTokens, scale: float) -> Tensor:
    """int64 [R, K, C], ascending: the chunks of each row and key head with the largest attention.

    query: [R, N, D], of the token at `part.turn`. key: [R, K, S, D]. The weights of a query head
    are the softmax of its products with the mean keys of the chunks. The query heads of one key
    head are summed. A row with fewer than C chunks has all of them, and junk after them.
    """
    rows, key_heads = key.shape[:2]
    count, most = int(part.chunks.max(initial=0)), int(part.kept.max(initial=0))
    every = torch.arange(count, device=key.device)
    if count == most:
        return every.expand(rows, key_heads, -1)
    chunks = key[:, :, part.sinks : part.sinks + count * part.chunk]
    means = chunks.unflatten(2, (count, part.chunk)).mean(3)  # [R, K, M, D]
    scores = query.unflatten(1, (key_heads, -1)) @ means.transpose(2, 3) * scale
    beyond = (every >= to_device(part.chunks, key.device)[:, None])[:, None]  # [R, 1, M]
    weights = scores.float().masked_fill(beyond[:, :, None], -torch.inf).softmax(-1).sum(2)
    chosen = weights.masked_fill(beyond, -1.0).topk(most, dim=-1).indices
    # Chunks that a row does not have come last.
    chosen = torch.where(beyond.expand_as(weights).gather(2, chosen), count, chosen)
    return chosen.sort(-1).values.clamp(max=count - 1)


def _reads_queries(lm: CachedLM, forward: Forward) -> bool:
    """Whether each layer of this forward of the target calls its watch, by a trial on one token."""
    seen: set[int] = set()
    trial = WatchedLM(lm.model, trial=True)
    trial.forward_pass, trial.watch = forward, lambda layer, *rest: seen.add(layer)
    trial.reset(1, 1)
    with torch.inference_mode():
        trial.forward(torch.zeros(1, 1, dtype=torch.int64, device=lm.device), np.zeros(1, int))
    return len(seen) == lm.layers


@DRAFTERS.register("sparse")
class SparseDrafter(VerifyingDrafter):
    """The target, whose tokens attend to a part of the text only, in any shape (TriForce,
    2404.11912, section 4.1). It also verifies the drafts of another drafter in a cascade.

    A draft sees the first `sinks` tokens, the last `recent` ones, and between them the chunks of
    `chunk` tokens with the largest attention, so that it sees about `budget` tokens. Each layer
    and each of its key heads chooses: see `choose_chunks`. The query is that of the text's last
    token when the row joins, and then that of every `every`-th token. One pass of the target reads
    this token again, over all keys and values. The kept keys and values are gathered in separate
    slots. Those of later tokens are copied behind them after each verification. So a draft
    depends on the text of its row only.

    The paper chooses once, after the prompt, and each head has its own keys there. In place of
    sinks it keeps the first chunk. The tokens after the prompt overwrite chosen chunks; here they
    come in addition, up to `every` and a draft.

    Raises UserError for sizes below 1, and for a budget without room for a chunk. Where it meets
    the target: for layers with a sliding window or a running state, and for models whose queries
    the loop cannot read.
    """

    reads_cache = True
    decoder_only = True  # the slots of a part have no sources
    per_row = MappingProxyType({"_joined": lambda new: new.lengths - 1, "_turn": -1, "_copied": 0})
    _joined: np.ndarray  # [B]: the last token when the row joined
    _turn: np.ndarray  # [B]: the token that chose last, −1 for none
    _copied: np.ndarray  # [B]: how many tokens of the text are gathered or copied

    def __init__(
        self, sinks: int = 4, recent: int = 128, chunk: int = 8, budget: int = 512, every: int = 64
    ) -> None:
        super().__init__(None)  # it gets the target's vocabulary with the target
        require_whole(sinks=sinks, recent=recent, chunk=chunk, budget=budget, every=every)
        if budget < sinks + recent + chunk:
            raise UserError(
                f"a budget of {budget} tokens has no room for {sinks} sinks, {recent} recent "
                f"tokens and a chunk of {chunk}; expected at least {sinks + recent + chunk}"
            )
        self.sinks, self.recent, self.chunk = sinks, recent, chunk
        self.budget, self.every = budget, every
        self._target: CachedLM | None = None
        self._reader: SparseReader | None = None
        self._lm: PartLM | None = None

    @property
    def lm(self) -> PartLM:
        """The form of the target that drafts."""
        assert self._lm is not None, "attach() comes before draft()"
        return self._lm

    @property
    def device(self) -> torch.device:
        return self.lm.device

    def attach(self, lm: CachedLM) -> None:
        if self._target is lm:
            return
        lm.view(Sublayers())  # refuses a target without a form that drafts
        reader, kind = SparseReader(lm, Sublayers()), type(lm.model).__name__
        windows = [window for window in layer_windows(lm.model) if window is not None]
        if windows and min(windows) < lm.max_positions:
            raise UserError(
                f"{kind} has layers with a window of {min(windows)} tokens, which attend to a part "
                "of the text already; sparse needs layers that attend to the complete text, so "
                "choose another drafter"
            )
        forward = watchable_forward(lm.forward_pass)
        if forward is None or not _reads_queries(lm, forward):
            raise UserError(
                f"sparse cannot read the queries of {kind}: it does not call its attention by "
                "name, or another library has wrapped it; choose another drafter"
            )
        reader.forward_pass, reader.watch = forward, self._gather
        self._target, self._reader, self._lm = lm, reader, PartLM(lm)
        self.vocab_size = lm.vocab_size

    def with_shape(self, shape: Shape) -> "SparseDrafter":
        other = copy.copy(self)
        other.shape, other._target = shape, None
        return other

    def start(self, contexts: Contexts) -> None:
        rows, room = contexts.tokens.shape
        super().start(contexts)
        self.lm.reset(rows, min(room, self.budget + self.chunk + self.every))
        self.lm.omitted = np.zeros(rows, dtype=np.int64)

    def prefill(self, contexts: Contexts, first: int = 0) -> None:
        self._read(contexts, 0)

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        if not limits.depths.any():
            return Draft.none(len(contexts.lengths), self.device)
        self._read(contexts, self.max_nodes(limits.max_depth))
        growth = SelfGrowth(self.lm, contexts, sampling)
        return self.shape.grow(growth, limits, sampling, rng)

    def make_room(self, contexts: Contexts, depths: np.ndarray) -> np.ndarray:
        # A pass can feed a chain as long as another row's after a text as long as its draft.
        self._read(contexts, 2 * int(depths.max(initial=0)))
        return depths.copy()

    def verify(self, contexts: Contexts, draft: Draft, drafting: np.ndarray) -> Tensor | Listed:
        return self.lm.verify(contexts, draft)

    def _read(self, contexts: Contexts, nodes: int) -> None:
        """Have all that the target has read of the texts, and room for these nodes."""
        assert self._target is not None
        lm, last = self.lm, contexts.lengths - 1
        since = last - self._joined
        turn = np.maximum(self._joined + since // self.every * self.every, 0)
        due = np.flatnonzero(turn != self._turn)
        part = self._part(turn)
        lm.omitted[due] = part.omitted[due]
        room = int((last - lm.omitted).max()) + 1 + nodes
        if room > lm.slots.allocated[1]:
            lm.add_rows(0, room)
        if len(due):
            self._choose(contexts, part, due)
        new = int((last - self._copied).max())
        if new > 0:
            # A row with fewer new tokens copies its last one again.
            tokens = self._copied[:, None] + np.arange(new)
            tokens = np.minimum(tokens, np.maximum(last - 1, 0)[:, None])
            self._copy(self._target, tokens)
        self._copied = last

    def _part(self, turn: np.ndarray) -> KeptTokens:
        """What is kept before the tokens at `turn`, int [B]."""
        most = (self.budget - self.sinks - self.recent) // self.chunk
        chunks = np.maximum(turn - self.recent - self.sinks, 0) // self.chunk
        return KeptTokens(self.sinks, self.chunk, turn, chunks, np.minimum(chunks, most))

    def _choose(self, contexts: Contexts, part: KeptTokens, due: np.ndarray) -> None:
        """Gather anew what these rows, int [R], keep."""
        reader = self._reader
        assert reader is not None
        self._due, self._due_part = due, part.of_rows(due)
        tokens = np.take_along_axis(contexts.tokens, part.turn[:, None], axis=1)
        with reader.slots.restored(part.turn, 1):
            reader.forward(to_device(tokens, self.device), part.turn)
        self._turn[due], self._copied[due] = part.turn[due], part.turn[due]

    def _gather(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        """Choose in one layer of the target, and gather there. See `WatchedLM`."""
        part, kept = self._due_part, self.lm.slots.layers[layer]
        if not kept.is_initialized:
            kept.lazy_initialization(key, value)
        rows = to_device(self._due, key.device)
        if len(rows) < len(key):
            query, key, value = query[rows], key[rows], value[rows]
        slots = part.slots(choose_chunks(query[:, :, 0], key, part, scale))
        self.lm.slots.wrote(np.full(len(self._turn), slots.shape[2]))
        for cache, full in ((kept.keys, key), (kept.values, value)):
            gathered = full.gather(2, slots[..., None].expand(-1, -1, -1, full.shape[3]))
            cache[rows, :, : slots.shape[2]] = gathered

    def _copy(self, target: CachedLM, tokens: np.ndarray) -> None:
        """Copy keys and values of these tokens, int [B, n], from the target."""
        self.lm.slots.copy_from(target.slots, tokens, tokens - self.lm.omitted[:, None])

    def rewind(self, lengths: np.ndarray) -> None:
        self._copied = np.minimum(self._copied, lengths)
        self._turn = np.where(self._turn < lengths, self._turn, -1)

    def keep_rows(self, rows: np.ndarray) -> None:
        super().keep_rows(rows)
        self.lm.keep_rows(rows)
        self.lm.omitted = self.lm.omitted[rows]

    def add_rows(self, contexts: Contexts, verification: Verification) -> None:
        new = len(contexts.lengths) - len(self._turn)
        self.lm.add_rows(new, 0)
        self.lm.omitted = np.pad(self.lm.omitted, (0, new))
        super().add_rows(contexts, verification)
