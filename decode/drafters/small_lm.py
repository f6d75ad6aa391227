"""A smaller language model of the same vocabulary that drafts a chain or a tree."""

import copy
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.base.device import reads_are_free, to_device
from decode.base.errors import UserError
from decode.draft import Contexts, Draft, Limits
from decode.drafters import DRAFTERS
from decode.drafters.draft_vocabulary import load_vocabulary
from decode.drafters.trained import VerifyingDrafter, take_weights
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.model.cache.cached_model import CachedLM
from decode.model.cache.pass_size import ROW_PADDING
from decode.model.cache.requirements import require_trees
from decode.model.cache.sliding_window import SlidingWindow
from decode.model.forward.low_rank import LowRank, adapted
from decode.model.loading import Target, load_model_and_tokenizer
from decode.model.memory import slot_bytes
from decode.shapes import Growth, Shape
from decode.shapes.static import stored_shape
from decode.verification import Verification

logger = logging.getLogger(__name__)

# At most this number of tokens of the text is fed with a chain: each takes a row of logits.
CATCH_UP = 8


@DRAFTERS.register("small_lm")
class SmallLMDrafter(VerifyingDrafter):
    """Draws tokens from `model` with the given sampling parameters, in any shape.

    A model with an encoder drafts for a target with an encoder: its own encoder reads the source of
    each row once, and its decoder reads the text. Others draft for targets without an encoder.

    Its cache always holds a prefix of the text it reads. The missing tokens go into the next
    forward; after full acceptance the drafter's last token is one of them.

    If a text is longer than the model's context, the model reads only the last part, with positions
    from 0. That part begins at a multiple of half the context, so it is fed again only once per
    half context. Where it begins depends only on the row.

    vocabulary: int64 [n], ascending, the token ids of the rows of a reduced output layer; None:
    row i of the output layer is token i. shape: default a chain. vocab_size: rows of the target's
    output layer; default the model's. tokens: ids from here on are padding and never drafted;
    default the rows that both output layers have. Raises UserError if the shape does not fit into
    the model's context.
    """

    trained = True
    feeds_chains = True  # whether the model reads the tokens of a chain that it drafts
    vocab_size: int
    per_row = MappingProxyType({"_begin": 0, "_cached": 0})
    _begin: np.ndarray  # [B]: the first token of the text that is read
    # [B]: all committed tokens before this one are in the cache, or before `_begin`.
    _cached: np.ndarray

    def __init__(
        self,
        model: PreTrainedModel,
        vocabulary: Tensor | None = None,
        shape: Shape | None = None,
        *,
        vocab_size: int | None = None,
        tokens: int | None = None,
    ) -> None:
        rows: int = model.config.get_text_config().vocab_size
        super().__init__(vocab_size or rows, shape)
        self.lm = CachedLM(model)
        self.module = self.lm.forward_pass
        self.decoder_only = self.lm.sources is None
        self.known = rows  # ids below this have an embedding
        self.tokens = min(rows, self.vocab_size, tokens or rows)
        # The number of rows of the output layer that may be drafted: the first ones, as ids ascend.
        self.rows = self.tokens
        if vocabulary is not None:
            self.rows = int((vocabulary < self.tokens).sum())
            vocabulary = vocabulary[: self.rows]
        self.vocabulary = vocabulary
        if (self.shape.depth or 0) >= self.lm.max_positions:
            raise UserError(
                f"a tree {self.shape.depth} deep does not fit into the context of the drafter "
                f"{type(model).__name__}, which holds {self.lm.max_positions} tokens, text "
                "included; make the tree shallower"
            )
        self._capacity = 0  # tokens of a row that the model can attend to
        # The last chain, its tokens that are in the cache, [B, n], and the lengths before them.
        self._fed: tuple[Draft, Tensor, np.ndarray] | None = None
        self._warned = False  # about a text that is longer than its context

    @property
    def device(self) -> torch.device:
        return self.lm.device

    @property
    def token_bytes(self) -> int:
        return slot_bytes(self.lm.model)

    @property
    def rewinds(self) -> bool:
        # The part of a cascade feeds texts that differ by more than a draft.
        return self.lm.states is None

    @classmethod
    def of_target(
        cls,
        model: PreTrainedModel,
        target: Target,
        vocabulary: Tensor | None = None,
        shape: Shape | None = None,
    ) -> "SmallLMDrafter":
        """For a model with the target's tokenizer. Its output layer may have different padding."""
        size = target.vocab_size
        return cls(model, vocabulary, shape, vocab_size=size, tokens=target.token_count)

    @classmethod
    def load(cls, path: Path, target: Target, *, dtype: str) -> "SmallLMDrafter":
        """Loads a directory written by `decode.drafters.draft_vocabulary.save_with_vocabulary`,
        with the shape stored there."""
        device = str(target.device)
        loaded = load_model_and_tokenizer(
            str(path), dtype=dtype, device=device, encoder=target.has_encoder
        )
        model = loaded.model
        reduced = load_vocabulary(path, model)
        return cls.of_target(model, target, reduced.ids if reduced else None, stored_shape(path))

    def with_shape(self, shape: Shape) -> "SmallLMDrafter":
        sizes = {"vocab_size": self.vocab_size, "tokens": self.tokens}
        drafter = type(self)(self.lm.model, self.vocabulary, shape, **sizes)
        drafter.lm.narrow(self.lm.window)
        return drafter

    def with_window(self, window: SlidingWindow) -> "SmallLMDrafter":
        other, other.lm = copy.copy(self), CachedLM(self.lm.model)
        other.lm.narrow(window)
        return other

    def with_adapter(self, adapters: Mapping[str, LowRank]) -> "SmallLMDrafter":
        """The same drafter with an adapter on its model (`decode.model.forward.low_rank`)."""
        other, lm = copy.copy(self), CachedLM(adapted(self.lm.model, adapters, keep=self))
        other.lm, other.module = lm, lm.forward_pass
        other.lm.narrow(self.lm.window)
        return other

    def read(self, contexts: Contexts) -> Contexts:
        """The texts in the model's tokens, in as much space as the model needs slots. Here they are
        the target's tokens."""
        return contexts

    def unchanged(self, text: Contexts) -> np.ndarray:
        """int [B]: how many tokens at the start of each text, as read, are surely the same as when
        the last draft was made, or were drafted. All but the target's last token."""
        return text.lengths - 1

    def to_read(self, ids: Tensor) -> Tensor:
        """The model's tokens for draft tokens, int64."""
        return ids

    def draft_logits(self, logits: Tensor) -> Tensor:
        """The logits of the tokens that may be drafted, [..., V'], of the model's logits."""
        return logits[..., : self.rows]

    def attach(self, lm: CachedLM) -> None:
        """Raises UserError for an encoder, if the target has none or reads longer sources."""
        if self.lm.sources is None:
            return
        name = type(self.lm.model).__name__
        if lm.sources is None:
            raise UserError(
                f"the drafter {name} has an encoder, but the target has none; use a decoder-only "
                "drafter"
            )
        if self.lm.max_prompt < lm.max_prompt:
            raise UserError(
                f"the encoder of the drafter {name} reads fewer than {self.lm.max_prompt} tokens, "
                f"but the target's reads fewer than {lm.max_prompt}; use a drafter with as many "
                "positions"
            )

    def start(self, contexts: Contexts) -> None:
        rows, slots = self.read(contexts).tokens.shape
        self._capacity = min(slots, self.lm.max_positions)
        self.lm.reset(rows, slots)
        if self.shape.branches:
            require_trees(self.lm.model)
        self._fed = None
        super().start(contexts)

    def add_rows(self, contexts: Contexts, verification: Verification) -> None:
        rows, slots = self.read(contexts).tokens.shape
        new = rows - len(self._begin)
        self._capacity = min(slots, self.lm.max_positions)
        self.lm.add_rows(new, slots)
        super().add_rows(contexts, verification)

    def prefill(self, contexts: Contexts, first: int = 0) -> None:
        if self.lm.sources is not None:
            assert contexts.sources is not None
            self.lm.encode(contexts.sources[first:], first)
        text = self.read(contexts)
        joins = np.arange(len(text.lengths)) >= first  # the others feed nothing
        ends = np.where(joins, text.lengths - 1, self._cached)
        self.feed(text, ends, joins & (text.lengths < self._capacity))

    def feed(self, contexts: Contexts, ends: np.ndarray, drafting: np.ndarray) -> Tensor | None:
        """Feeds the first `ends` (int [B]) tokens of the texts, as read, as far as the cache lacks
        them, for the rows that draft (`drafting`, bool [B]).

        Returns the logits after the last of these tokens, [B, V'], valid in the rows that draft;
        None if they lack nothing."""
        missing = self.take_missing(contexts, ends, drafting)
        if missing is None:
            return None
        ids, start, counts = missing
        return self.lm.read(to_device(ids, self.lm.device), start, counts)[:, 0]

    def missing(self, ends: np.ndarray, drafting: np.ndarray) -> np.ndarray:
        """int [B]: how many of the first `ends` (int [B]) tokens of each text to feed: all that the
        cache lacks, or in rows that do not draft at most as many as padding would take."""
        missing = np.clip(ends - self._cached, 0, ends - self._begin)
        free = ROW_PADDING if self.lm.pads else 0
        return np.where(drafting, missing, np.minimum(missing, free))

    def take_missing(
        self, contexts: Contexts, ends: np.ndarray, drafting: np.ndarray, behind: int = 0
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """The tokens that `feed` feeds, which count as cached from now on: int64 [B, n]; the slot
        of each row's first one, int [B]; and how many of them each row has, int [B]: the rest is
        padding. None if the rows that draft lack nothing. behind: the tokens that the same pass
        feeds behind them."""
        missing = self.missing(ends, drafting)
        lacking = int(missing[drafting].max(initial=0))
        if not lacking:
            return None
        tokens, known = contexts.tokens, np.clip(self._cached - self._begin, 0, ends - self._begin)
        start = known
        if self.lm.pads:  # padding needs slots too; without them a row feeds tokens again
            start = np.minimum(known, tokens.shape[1] - lacking - behind)
        counts = np.minimum(known + missing - start, lacking)
        columns = np.arange(lacking)[None, :] + (start + self._begin)[:, None]
        ids = np.take_along_axis(tokens, np.minimum(columns, tokens.shape[1] - 1), axis=1)
        self._cached = self._begin + start + counts
        # Ids without an embedding occur only in rows that must not draft.
        return np.minimum(ids, self.known - 1), start, counts

    def verify(self, contexts: Contexts, draft: Draft, drafting: np.ndarray) -> Tensor:
        """The logits after each text and after each node of a chain, [B, N+1, V]: this model in the
        place of the target. −inf for tokens that it never drafts.

        One pass feeds what the cache lacks of the texts that draft, and their chains. drafting: as
        for `feed`. The cache then holds the chains. `rewind` takes back what is not accepted."""
        lengths, read = contexts.lengths, contexts.lengths - self._begin
        lacking = int((lengths - self._cached)[drafting].max())
        if lacking > min(CATCH_UP, int(read.min())):
            self.feed(contexts, lengths - 1, drafting)
            lacking = 1
        nodes, pads = draft.tokens.shape[1], self.lm.pads  # with padding all rows feed as much
        own = np.where(pads, lacking, np.clip(lengths - self._cached, 1, lacking))
        sizes, fed_B = np.where(pads, nodes, draft.sizes), drafting | pads
        ids = np.take_along_axis(contexts.tokens, np.arange(-lacking, 0) + lengths[:, None], 1)
        fed = torch.cat([to_device(ids, self.lm.device), draft.tokens], 1).clamp(max=self.known - 1)
        places = np.arange(lacking + nodes) + (lacking - own)[:, None]
        fed = fed.gather(1, to_device(np.minimum(places, lacking + nodes - 1), self.lm.device))
        counts, at = np.where(fed_B, own + sizes, 0), own[:, None] - 1 + np.arange(nodes + 1)
        logits = self.lm.forward(fed, read - own, columns=at, counts=counts)
        reached = fed_B & (lengths - self._cached <= lacking)
        self._cached = np.where(reached, lengths + sizes, self._cached)
        logits = logits[..., : self.rows]
        if self.vocabulary is None and self.rows == self.vocab_size:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        full[..., slice(self.rows) if self.vocabulary is None else self.vocabulary] = logits
        return full

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        text = self.read(contexts)
        lengths = text.lengths
        # A row that must not draft gets meaningless input, and its draft is not used.
        depths = self.make_room(text, limits.depths)
        if not depths.any():
            return Draft.none(len(lengths), self.lm.device)
        growth = self.growth(contexts, sampling, depths)
        growth.depths = depths
        draft = self.shape.grow(growth, replace(limits, depths=depths), sampling, rng)
        # The last token of a chain was not fed. Tree nodes are not always in their text slots.
        fed = growth.fed.shape[1] if self.feeds_chains and not self.shape.branches else 0
        self._fed = (draft, self.to_read(growth.fed), lengths) if fed else None
        # A row was fed what has children in its draft.
        fed_B = np.clip(depths - 1, 0, fed)
        self._cached = np.where(self._cached == lengths, lengths + fed_B, self._cached)
        return draft

    def growth(self, contexts: Contexts, sampling: Sampling, depths: np.ndarray) -> Growth:
        """What the shape draws the draft from. depths: int [B], the max depth per row."""
        return _LMGrowth(self, contexts, sampling, depths)

    def make_room(self, contexts: Contexts, depths: np.ndarray) -> np.ndarray:
        """int [B]: how deep each row can be drafted, at most `depths`, int [B]. In rows whose text
        and draft do not fit into the context, the part that is read begins later."""
        depths = np.minimum(self._capacity - 1, depths)
        depths = np.where(self._knows(contexts), depths, 0)
        self._move_begin(contexts.lengths, depths)
        return depths

    def _move_begin(self, lengths: np.ndarray, depths: np.ndarray) -> None:
        over = lengths + depths - self._capacity
        if not (over > self._begin).any():
            return
        if not self._warned:
            self._warned = True
            logger.warning(
                "the drafter %s has a context of %d tokens, but a text is longer: the drafter "
                "reads only the last part of that text, about half of its context or more",
                type(self.lm.model).__name__,
                self._capacity,
            )
        # `begin` depends only on a row's length and depth, and grows with them. So it is the same
        # in any batch, even if rows that do not draft are moved with the others.
        step = max(1, self._capacity // 2)
        begin = np.minimum(-(-over // step) * step, lengths - 1)
        later = begin > self._begin
        self._begin = np.where(later, begin, self._begin)
        self._cached = np.where(later, begin, self._cached)

    def _knows(self, contexts: Contexts) -> np.ndarray:
        """bool [B]: whether it has embeddings for all tokens of a row's text. The target can emit
        tokens from its padding rows, and those may be missing here."""
        if self.known >= self.vocab_size:
            return np.ones(len(contexts.lengths), dtype=bool)
        inside = np.arange(contexts.tokens.shape[1]) < contexts.lengths[:, None]
        return np.logical_not(((contexts.tokens >= self.known) & inside).any(axis=1))

    def observe(self, verification: Verification) -> None:
        text = self.read(verification.contexts)
        self._cached = np.minimum(self._cached, self.unchanged(text))
        last, self._fed = self._fed, None
        if last is None or verification.draft is last[0]:
            return
        # Beside another drafter, that one's tokens may have been accepted, and not those fed.
        _, fed, stays = last
        if reads_are_free(fed.device):
            stays = text.unchanged_lengths(fed.cpu().numpy(), stays)
        # Elsewhere, a read would take longer than feeding these few tokens again.
        self._cached = np.minimum(self._cached, stays)

    def rewind(self, lengths: np.ndarray) -> None:
        self._cached, self._fed = np.minimum(self._cached, lengths), None

    def keep_rows(self, rows: np.ndarray) -> None:
        super().keep_rows(rows)
        self.lm.keep_rows(rows)

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replaces some weights, also in the middle of texts: the cache is then computed again.
        Never call it during a draft, because q must come from one set of weights. Raises UserError
        for weights that the model does not have, or a model with an encoder, and then changes
        nothing.
        """
        if self.lm.sources is not None:
            raise UserError(
                "the weights of a small model with an encoder cannot be exchanged: its encoder has "
                "read the sources; open a new drafter"
            )
        take_weights(self.lm.model, weights)
        self.lm.refresh()
        self._cached = self._begin.copy()


class CachedGrowth(Growth):
    """Feeds the nodes to a model over slots.

    lm: the model. lengths: int [B], the slot of each row's first node. vocabulary: as for `Growth`.
    reads_out: whether the model's logits are computed.
    """

    reads_out = True

    def __init__(
        self,
        lm: CachedLM,
        lengths: np.ndarray,
        contexts: Contexts,
        sampling: Sampling,
        vocab_size: int,
        vocabulary: Tensor | None = None,
    ) -> None:
        super().__init__(contexts, sampling, lm.device, vocab_size, vocabulary)
        self.lm, self.lengths = lm, lengths

    def _extend(self, count: int) -> Tensor:
        before = self.fed.shape[1] - count
        new = self.to_read(self.fed[:, before:])
        seen = None if self.ancestors is None else self.ancestors[:, before:]
        return self.of_tokens(self.feed(new, before, seen, self.needed(count)))

    def feed(
        self, ids: Tensor, before: int, seen: Tensor | None, counts: np.ndarray | None = None
    ) -> Tensor:
        """The model's logits after these tokens, int64 [B, n].

        before: the number of nodes in the slots before them; −1 for the text's last token. seen:
        bool [B, n, m], for a tree of m nodes, those that each token may see. None: a chain.
        counts: int [B], how many of them each row feeds. None: all.
        """
        columns = None if self.reads_out else np.zeros((self.rows, 0), dtype=np.int64)
        depths = None if seen is None else seen.sum(2) - 1
        return self.lm.forward(
            ids,
            self.lengths + before,
            columns=columns,
            counts=counts,
            depth_BN=depths,
            ancestors_BNM=seen,
        )

    def of_tokens(self, logits: Tensor) -> Tensor:
        """The logits of the tokens that may be drafted: the first rows of the output layer."""
        return logits

    def to_read(self, ids: Tensor) -> Tensor:
        """The model's tokens for draft tokens, int64."""
        return ids


class _LMGrowth(CachedGrowth):
    def __init__(
        self, drafter: SmallLMDrafter, contexts: Contexts, sampling: Sampling, depths: np.ndarray
    ) -> None:
        """depths: int [B], the max depth per row."""
        self.text = drafter.read(contexts)
        lengths = self.text.lengths - drafter._begin  # of the part that is read
        vocabulary = drafter.vocabulary
        super().__init__(drafter.lm, lengths, contexts, sampling, drafter.vocab_size, vocabulary)
        self.drafter = drafter
        logits = drafter.feed(self.text, self.text.lengths, depths > 0)
        assert logits is not None  # the last committed token is never in the cache
        self.first_logits = self.of_tokens(logits)

    def _first(self) -> Tensor:
        return self.first_logits

    def of_tokens(self, logits: Tensor) -> Tensor:
        return self.drafter.draft_logits(logits)

    def to_read(self, ids: Tensor) -> Tensor:
        return self.drafter.to_read(ids)
