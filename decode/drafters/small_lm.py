"""A smaller language model of the same vocabulary that drafts a chain or a tree."""

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


@DRAFTERS.register("small_lm")
class SmallLMDrafter(ShapedDrafter):
    """Draws tokens from `model`, with the sampling parameters it is given, in any shape.

    Its cache always holds a prefix of the committed text; whatever it lacks (after full
    acceptance that is its own last token too) goes into the next forward. A row whose text fills
    the model's positions, or its attention window, drafts nothing more.

    vocabulary: int64 [n], ascending, the token ids of the rows of a reduced output layer; None:
    the output layer has a row for every token. shape: default a chain. Raises UserError for a
    shape that is deeper than the model's context.
    """

    trained = True

    def __init__(
        self,
        model: PreTrainedModel,
        vocabulary: Tensor | None = None,
        shape: Shape | None = None,
    ) -> None:
        super().__init__(model.config.get_text_config().vocab_size, shape)
        self.lm = CachedLM(model)
        self.vocabulary = vocabulary
        if (self.shape.depth or 0) >= self.lm.max_positions:
            raise UserError(
                f"a tree {self.shape.depth} deep does not fit into the context of the drafter "
                f"{type(model).__name__}, which holds {self.lm.max_positions} tokens, text "
                "included; make the tree shallower"
            )
        self._capacity = 0  # tokens of a row that the model can attend to
        self._cached = np.zeros(0, dtype=np.int64)  # [B]: committed tokens that are in the cache

    @classmethod
    def load(cls, path: Path, target: Target, *, dtype: str) -> "SmallLMDrafter":
        """A directory as `decode.vocabulary.save_with_vocabulary` writes it, in the shape that is
        stored there."""
        place = str(target.device)
        model = load_model_and_tokenizer(str(path), dtype=dtype, device=place).model
        reduced = load_vocabulary(path, model)
        return cls(model, reduced.ids if reduced else None, stored_shape(path))

    def with_shape(self, shape: Shape) -> "SmallLMDrafter":
        return SmallLMDrafter(self.lm.model, self.vocabulary, shape)

    def start(self, contexts: Contexts) -> None:
        rows, slots = contexts.tokens.shape
        window = sliding_window(self.lm.model) or slots
        self._capacity = min(slots, window, self.lm.max_positions)
        self.lm.reset(rows, slots, longest=self._capacity)
        self._cached = np.zeros(rows, dtype=np.int64)

    def prefill(self, contexts: Contexts) -> None:
        lengths = contexts.lengths
        self.feed(contexts, lengths - 1, wanted=lengths < self._capacity)

    def feed(self, contexts: Contexts, ends: np.ndarray, wanted: np.ndarray) -> Tensor | None:
        """Feed what the cache lacks of the first `ends` (int [B]) tokens of the texts, for the rows
        that are wanted (bool [B]) and for others that lack no more. The logits after each row's
        last of them, [B, V'], in the rows fed; None where nothing is lacking."""
        # Every row feeds as many tokens as the row that lacks most. For the others that feeds a few
        # once more, which writes the same keys and values again and keeps the batch rectangular.
        missing = ends - self._cached
        lacking = int(missing[wanted].max(initial=0))
        if not lacking:
            return None
        start = np.maximum(ends - lacking, 0)
        columns = np.arange(lacking)[None, :] + start[:, None]
        ids = np.take_along_axis(contexts.tokens, columns, axis=1)
        logits = self.lm.forward(
            torch.as_tensor(ids, device=self.lm.device),
            start,
            columns=np.maximum(np.minimum(ends - start, lacking) - 1, 0),
        )
        self._cached = np.where(missing <= lacking, ends, self._cached)
        return logits[:, 0]

    def draft(self, contexts: Contexts, limits: Limits, sampling: Sampling, noise: Noise) -> Draft:
        lengths = contexts.lengths
        # Each row has its own room, or its text would depend on the rows beside it. What a row
        # without room is fed is worthless, and so is what it drafts.
        depths = np.minimum(np.clip(self._capacity - lengths, 0, None), limits.depths)
        if not depths.any():
            return Draft.none(len(lengths), self.lm.device)
        growth = _LMGrowth(self, contexts, sampling, depths > 0)
        draft = self.shape.grow(growth, Limits(depths, limits.stops), sampling, noise)
        # The last token of a chain was never fed; of a tree, no node need stand in its slot.
        fed = 0 if self.shape.branches else growth.fed.shape[1]
        # What is committed next in a row that shall not draft need not be what was fed there.
        fed_B = fed * (depths > 0)
        self._cached = np.where(self._cached == lengths, lengths + fed_B, self._cached)
        return draft

    def commit(self, contexts: Contexts) -> None:
        # Of the committed text, everything but the target's own last token was drafted or cached.
        self._cached = np.minimum(self._cached, contexts.lengths - 1)

    def keep_rows(self, rows: torch.Tensor) -> None:
        self.lm.keep_rows(rows.to(self.lm.device))
        self._cached = self._cached[rows.cpu().numpy()]

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Go on with other values of some weights, also in the middle of texts: what is cached is
        of the old ones, and is computed again. Never while it drafts: q is that of one set of
        weights. Raises UserError, with nothing changed, for weights that its model does not have.
        """
        take_weights(self.lm.model, weights)
        self.lm.refresh()
        self._cached = np.zeros_like(self._cached)


class _LMGrowth(Growth):
    def __init__(
        self, drafter: SmallLMDrafter, contexts: Contexts, sampling: Sampling, wanted: np.ndarray
    ) -> None:
        """wanted: bool [B], the rows that shall draft at all."""
        super().__init__(
            contexts, sampling, drafter.lm.device, drafter.vocab_size, drafter.vocabulary
        )
        self.drafter, self.wanted = drafter, wanted

    def _first(self) -> Tensor:
        logits = self.drafter.feed(self.contexts, self.contexts.lengths, self.wanted)
        assert logits is not None  # the last committed token is never in the cache
        return logits

    def _extend(self, count: int) -> Tensor:
        before = self.fed.shape[1] - count
        new = self.fed[:, before:]
        start = self.contexts.lengths + before
        if self.ancestors is None:
            return self.drafter.lm.forward(new, start)
        seen = self.ancestors[:, before:]
        return self.drafter.lm.forward(new, start, depth_BN=seen.sum(2) - 1, ancestors_BNM=seen)
