"""A smaller language model of the same vocabulary that drafts a chain, token by token."""

from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from decode.draft import Draft
from decode.drafters import DRAFTERS, Contexts, Drafter
from decode.kv import CachedLM
from decode.sampling import Noise, Sampling, draw
from decode.target import load_model_and_tokenizer


@DRAFTERS.register("small_lm")
class SmallLMDrafter(Drafter):
    """Draws γ tokens from `model`, with the sampling parameters of the target.

    Its cache always holds a prefix of the committed text; whatever it lacks (after full
    acceptance that is its own last token too) goes into the next forward. While the longest text
    of the batch fills the model's positions, nothing is drafted.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.lm = CachedLM(model)
        self._cached = np.zeros(0, dtype=np.int64)  # [B]: committed tokens that are in the cache

    @classmethod
    def load(cls, path: Path, *, dtype: str, device: str) -> "SmallLMDrafter":
        """A model directory as `save_pretrained` writes it."""
        return cls(load_model_and_tokenizer(str(path), dtype=dtype, device=device).model)

    def start(self, contexts: Contexts) -> None:
        rows, capacity = contexts.tokens.shape
        self.lm.reset(rows, min(capacity, self.lm.max_positions))
        self._cached = np.zeros(rows, dtype=np.int64)

    def draft(self, contexts: Contexts, gamma: int, sampling: Sampling, noise: Noise) -> Draft:
        lengths = contexts.lengths
        gamma = min(gamma, self.lm.max_positions - int(lengths.max()))
        if gamma < 1:
            return Draft.none(len(lengths), self.lm.device)
        # Every row feeds as many tokens as the row that lacks most. For the others that feeds a few
        # once more, which writes the same keys and values again and keeps the batch rectangular.
        lacking = int((lengths - self._cached).max())
        start = np.maximum(lengths - lacking, 0)
        columns = np.arange(lacking)[None, :] + start[:, None]
        fed = np.take_along_axis(contexts.tokens, columns, axis=1)
        ids = torch.as_tensor(fed, device=self.lm.device)
        logits = self.lm.forward(ids, start, columns=lengths - 1 - start)

        tokens, q = [], []
        for place in range(gamma):
            if place:
                at = lengths + (place - 1)
                logits = self.lm.forward(tokens[-1][:, None], at, columns=np.zeros_like(at))
            row_logits = logits[:, 0]
            if sampling.greedy:
                tokens.append(row_logits.argmax(-1))
            else:
                q.append(sampling.probs(row_logits))
                uniform = noise.uniforms(Noise.DRAFT, place, 1)[:, 0]
                tokens.append(draw(q[-1], uniform))
        # The last drafted token was never fed.
        self._cached = lengths + gamma - 1
        return Draft(
            torch.stack(tokens, 1),
            np.full(len(lengths), gamma),
            q=torch.stack(q, 1) if q else None,
        )

    def commit(self, contexts: Contexts) -> None:
        # Of the committed text, everything but the target's own last token was drafted or cached.
        self._cached = np.minimum(self._cached, contexts.lengths - 1)

    def keep_rows(self, rows: torch.Tensor) -> None:
        self.lm.keep_rows(rows.to(self.lm.device))
        self._cached = self._cached[rows.cpu().numpy()]
