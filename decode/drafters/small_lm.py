"""A smaller language model of the same vocabulary that drafts a chain, token by token."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.draft import Draft
from decode.drafters import DRAFTERS, Contexts, Drafter
from decode.kv import CachedLM, sliding_window
from decode.sampling import Noise, Sampling, draw
from decode.target import load_model_and_tokenizer
from decode.vocabulary import load_vocabulary


@DRAFTERS.register("small_lm")
class SmallLMDrafter(Drafter):
    """Draws γ tokens from `model`, with the sampling parameters of the target.

    Its cache always holds a prefix of the committed text; whatever it lacks (after full
    acceptance that is its own last token too) goes into the next forward. A row whose text fills
    the model's positions, or its attention window, drafts nothing more.

    vocabulary: int64 [n], ascending, the token ids of the rows of a reduced output layer; None:
    the output layer has a row for every token.
    """

    def __init__(self, model: PreTrainedModel, vocabulary: Tensor | None = None) -> None:
        self.lm = CachedLM(model)
        self.vocabulary = vocabulary
        self._vocab_size = model.config.get_text_config().vocab_size
        self._capacity = 0  # slots of the cache
        self._cached = np.zeros(0, dtype=np.int64)  # [B]: committed tokens that are in the cache

    @classmethod
    def load(cls, path: Path, *, dtype: str, device: str) -> "SmallLMDrafter":
        """A directory as `decode.vocabulary.save_with_vocabulary` writes it."""
        model = load_model_and_tokenizer(str(path), dtype=dtype, device=device).model
        reduced = load_vocabulary(path, model)
        return cls(model, reduced.ids if reduced else None)

    def start(self, contexts: Contexts) -> None:
        rows, capacity = contexts.tokens.shape
        window = sliding_window(self.lm.model) or capacity
        self._capacity = min(capacity, self.lm.max_positions, window)
        self.lm.reset(rows, self._capacity)
        self._cached = np.zeros(rows, dtype=np.int64)

    def draft(self, contexts: Contexts, gamma: int, sampling: Sampling, noise: Noise) -> Draft:
        lengths = contexts.lengths
        # Each row has its own room, or its text would depend on the rows beside it. What a row
        # without room is fed is worthless, and so is what it drafts.
        sizes = np.clip(self._capacity - lengths, 0, gamma)
        gamma = int(sizes.max())
        if gamma < 1:
            return Draft.none(len(lengths), self.lm.device)
        # Every row feeds as many tokens as the row that lacks most. For the others that feeds a few
        # once more, which writes the same keys and values again and keeps the batch rectangular.
        lacking = int((lengths - self._cached)[sizes > 0].max())
        start = np.clip(lengths - lacking, 0, self._capacity - lacking)
        columns = np.arange(lacking)[None, :] + start[:, None]
        fed = np.take_along_axis(contexts.tokens, columns, axis=1)
        ids = torch.as_tensor(fed, device=self.lm.device)
        logits = self.lm.forward(ids, start, columns=np.minimum(lengths - start, lacking) - 1)

        tokens: list[Tensor] = []
        q: list[Tensor] = []
        for place in range(gamma):
            if place:
                at = np.minimum(lengths + (place - 1), self._capacity - 1)
                logits = self.lm.forward(tokens[-1][:, None], at, columns=np.zeros_like(at))
            row_logits = logits[:, 0]
            if sampling.greedy:
                drawn = row_logits.argmax(-1)
            else:
                probs = sampling.probs(row_logits)
                drawn = draw(probs, noise.uniforms(Noise.DRAFT, place, 1)[:, 0])
                q.append(self._whole(probs))
            tokens.append(drawn if self.vocabulary is None else self.vocabulary[drawn])
        # The last drafted token was never fed.
        self._cached = lengths + gamma - 1
        return Draft(
            torch.stack(tokens, 1),
            sizes,
            q=torch.stack(q, 1) if q else None,
        )

    def _whole(self, probs: Tensor) -> Tensor:
        """Probabilities over the draft vocabulary [B, n] as q over the whole one [B, V]."""
        if self.vocabulary is None:
            return probs
        whole = probs.new_zeros(len(probs), self._vocab_size)
        return whole.index_copy_(1, self.vocabulary, probs)

    def commit(self, contexts: Contexts) -> None:
        # Of the committed text, everything but the target's own last token was drafted or cached.
        self._cached = np.minimum(self._cached, contexts.lengths - 1)

    def keep_rows(self, rows: torch.Tensor) -> None:
        self.lm.keep_rows(rows.to(self.lm.device))
        self._cached = self._cached[rows.cpu().numpy()]
