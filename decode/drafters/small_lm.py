"""A smaller language model of the same vocabulary that drafts a chain or a tree."""

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.draft import Draft
from decode.drafters import DRAFTERS, Contexts, Limits
from decode.drafters.shaped import ShapedDrafter
from decode.errors import UserError
from decode.growth import Growth
from decode.kv import CachedLM, sliding_window
from decode.new_weights import take_weights
from decode.sampling import Noise, Sampling
from decode.shapes import Shape
from decode.stored_tree import stored_shape
from decode.target import Target, load_model_and_tokenizer
from decode.vocabulary import load_vocabulary

logger = logging.getLogger(__name__)


@DRAFTERS.register("small_lm")
class SmallLMDrafter(ShapedDrafter):
    """Draws tokens from `model`, with the sampling parameters it is given, in any shape.

    Its cache always holds a prefix of the text that it reads; whatever it lacks (after full
    acceptance that is its own last token too) goes into the next forward.

    A text longer than the model's context (its positions, or its attention window) is read from
    its last part only, with positions from 0. That part begins at a multiple of half the context,
    so it is fed anew only once in so many tokens, and where it begins depends on the row alone.

    vocabulary: int64 [n], ascending, the token ids of the rows of a reduced output layer; None:
    row i of the output layer is token i. shape: default a chain. vocab_size: rows of the target's
    output layer; default the model's own. tokens: ids from this on are padding, which is never
    drafted; default the rows that both have. Raises UserError for a shape that is deeper than the
    model's context.
    """

    trained = True

    def __init__(
        self,
        model: PreTrainedModel,
        vocabulary: Tensor | None = None,
        shape: Shape | None = None,
        *,
        vocab_size: int | None = None,
        tokens: int | None = None,
    ) -> None:
        own: int = model.config.get_text_config().vocab_size
        super().__init__(vocab_size or own, shape)
        self.lm = CachedLM(model)
        self.known = own  # ids that its embeddings have a row for
        self.tokens = min(own, self.vocab_size, tokens or own)
        # Rows of the output layer that may be drafted: the first so many, as ids ascend.
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
        self._begin = np.zeros(0, dtype=np.int64)  # [B]: the first token of the text that is read
        # [B]: the committed tokens before this one are in the cache, or before what is read.
        self._cached = np.zeros(0, dtype=np.int64)
        self._said = False  # that texts are longer than its context

    @classmethod
    def of_target(
        cls,
        model: PreTrainedModel,
        target: Target,
        vocabulary: Tensor | None = None,
        shape: Shape | None = None,
    ) -> "SmallLMDrafter":
        """A model with the target's tokenizer, whose output layer may be padded to other rows."""
        size = target.vocab_size
        return cls(model, vocabulary, shape, vocab_size=size, tokens=target.token_count)

    @classmethod
    def load(cls, path: Path, target: Target, *, dtype: str) -> "SmallLMDrafter":
        """A directory as `decode.vocabulary.save_with_vocabulary` writes it, in the shape that is
        stored there."""
        place = str(target.device)
        model = load_model_and_tokenizer(str(path), dtype=dtype, device=place).model
        reduced = load_vocabulary(path, model)
        return cls.of_target(model, target, reduced.ids if reduced else None, stored_shape(path))

    def with_shape(self, shape: Shape) -> "SmallLMDrafter":
        sizes = {"vocab_size": self.vocab_size, "tokens": self.tokens}
        return SmallLMDrafter(self.lm.model, self.vocabulary, shape, **sizes)

    def start(self, contexts: Contexts) -> None:
        rows, slots = contexts.tokens.shape
        window = sliding_window(self.lm.model) or slots
        self._capacity = min(slots, window, self.lm.max_positions)
        self.lm.reset(rows, slots, longest=self._capacity)
        self._begin = np.zeros(rows, dtype=np.int64)
        self._cached = np.zeros(rows, dtype=np.int64)

    def draft(self, contexts: Contexts, limits: Limits, sampling: Sampling, noise: Noise) -> Draft:
        lengths = contexts.lengths
        # A row that may not draft is fed something worthless, and so is what it drafts.
        depths = np.minimum(self._capacity - 1, limits.depths)
        depths = np.where(self._knows(contexts), depths, 0)
        if not depths.any():
            return Draft.none(len(lengths), self.lm.device)
        self._make_room(lengths, depths)
        growth = _LMGrowth(self, contexts, sampling, depths > 0)
        draft = self.shape.grow(growth, Limits(depths, limits.stops), sampling, noise)
        # The last token of a chain was never fed; of a tree, no node need stand in its slot.
        fed = 0 if self.shape.branches else growth.fed.shape[1]
        # What is committed next in a row that shall not draft need not be what was fed there.
        fed_B = fed * (depths > 0)
        self._cached = np.where(growth.whole_text, lengths + fed_B, self._cached)
        return draft

    def _make_room(self, lengths: np.ndarray, depths: np.ndarray) -> None:
        """Begin to read later in the rows whose text and draft, so deep (int [B]), do not fit."""
        over = lengths + depths - self._capacity
        if not (over > self._begin).any():
            return
        if not self._said:
            self._said = True
            logger.warning(
                "the drafter %s has a context of %d tokens and a text is longer: it drafts from "
                "the last part of that text only, about half of its context or more",
                type(self.lm.model).__name__,
                self._capacity,
            )
        # This only grows with a row's length and depth. So it is the same in any batch, also where
        # rows that are not asked are moved on with the others.
        step = max(1, self._capacity // 2)
        begin = np.minimum(-(-over // step) * step, lengths - 1)
        moved = begin > self._begin
        self._begin = np.where(moved, begin, self._begin)
        self._cached = np.where(moved, begin, self._cached)

    def _knows(self, contexts: Contexts) -> np.ndarray:
        """bool [B]: whether it has embeddings for all of a row's text. It may lack some of what
        the target can emit: rows that are padding there."""
        if self.known >= self.vocab_size:
            return np.ones(len(contexts.lengths), dtype=bool)
        inside = np.arange(contexts.tokens.shape[1]) < contexts.lengths[:, None]
        lacks: np.ndarray = np.any((contexts.tokens >= self.known) & inside, axis=1)
        return ~lacks

    def commit(self, contexts: Contexts) -> None:
        # Of the committed text, everything but the target's own last token was drafted or cached.
        self._cached = np.minimum(self._cached, contexts.lengths - 1)

    def keep_rows(self, rows: torch.Tensor) -> None:
        self.lm.keep_rows(rows.to(self.lm.device))
        kept = rows.cpu().numpy()
        self._begin, self._cached = self._begin[kept], self._cached[kept]

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Go on with other values of some weights, also in the middle of texts: what is cached is
        of the old ones, and is computed again. Never while it drafts: q is that of one set of
        weights. Raises UserError, with nothing changed, for weights that its model does not have.
        """
        take_weights(self.lm.model, weights)
        self.lm.refresh()
        self._cached = self._begin.copy()


class _LMGrowth(Growth):
    def __init__(
        self, drafter: SmallLMDrafter, contexts: Contexts, sampling: Sampling, wanted: np.ndarray
    ) -> None:
        """wanted: bool [B], the rows that shall draft at all.

        whole_text: bool [B], the rows whose whole text is in the cache once `first` was asked for:
        those that are wanted, and others that lacked no more.
        """
        super().__init__(
            contexts, sampling, drafter.lm.device, drafter.vocab_size, drafter.vocabulary
        )
        self.drafter, self.wanted = drafter, wanted
        self.lengths = contexts.lengths - drafter._begin  # of what is read
        self.whole_text = np.zeros(self.rows, dtype=bool)

    def _first(self) -> Tensor:
        lengths, drafter, tokens = self.lengths, self.drafter, self.contexts.tokens
        # Every row feeds as many tokens as the row that lacks most. For the others that feeds a few
        # once more, which writes the same keys and values again and keeps the batch rectangular.
        missing = self.contexts.lengths - drafter._cached
        lacking = int(missing[self.wanted].max())
        self.whole_text = missing <= lacking
        start = np.maximum(lengths - lacking, 0)
        columns = np.arange(lacking)[None, :] + (start + drafter._begin)[:, None]
        # A row that reads less than is fed goes on with padding, past its end.
        ids = np.take_along_axis(tokens, np.minimum(columns, tokens.shape[1] - 1), axis=1)
        logits = drafter.lm.forward(
            # Only a row that shall not draft has ids that the model lacks.
            torch.as_tensor(np.minimum(ids, drafter.known - 1), device=self.device),
            start,
            columns=np.minimum(lengths - start, lacking) - 1,
        )
        return self._of_tokens(logits[:, 0])

    def _extend(self, count: int) -> Tensor:
        before = self.fed.shape[1] - count
        new = self.fed[:, before:]
        start = self.lengths + before
        if self.ancestors is None:
            return self._of_tokens(self.drafter.lm.forward(new, start))
        seen = self.ancestors[:, before:]
        return self._of_tokens(
            self.drafter.lm.forward(new, start, depth_BN=seen.sum(2) - 1, ancestors_BNM=seen)
        )

    def _of_tokens(self, logits: Tensor) -> Tensor:
        """Without the rows of the output layer that are padding."""
        return logits[..., : self.drafter.rows]
