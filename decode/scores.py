"""The target's logits for a draft after all processors, and the distributions and tokens from them.

Shapes: B rows, N draft nodes, V vocabulary. Of the N+1 places per row, place 0 follows the context
and place i+1 follows node i.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from decode.contexts import Contexts
from decode.draft import Draft
from decode.processors import LogitsProcessor, penalise, process, tokens_before
from decode.sampling import Sampling


class Scores:
    """Computes only what a rule asks for: all distributions, one distribution per row, or tokens.

    logits: [B, N+1, V], after processors, before temperature and filters. float32 if a penalty or a
    processor changed them, else in the model's dtype. raw: the logits as the model returned them.
    """

    def __init__(
        self,
        logits: Tensor,
        sampling: Sampling,
        draft: Draft | None = None,
        contexts: Contexts | None = None,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.raw = logits
        self.sampling = sampling
        if sampling.repetition_penalty != 1 or processors:
            assert draft is not None
            assert contexts is not None
            ancestors = draft.ancestors()
            # Not `pad`: before torch 2.10 it refuses a draft without nodes.
            root = ancestors.new_zeros(len(ancestors), 1, ancestors.shape[2])
            before = torch.cat([root, ancestors], 1)  # [B, N+1, N]
            text = (contexts.tokens, contexts.lengths, draft.tokens, before)
            if sampling.repetition_penalty != 1:
                logits = penalise(logits, tokens_before(*text), sampling.repetition_penalty)
            if processors:
                logits = process(processors, logits, *text)
        self.logits = logits
        self._probs: Tensor | None = None

    def probs(self) -> Tensor:
        """float32 [B, N+1, V]: the distributions that tokens are drawn from."""
        if self._probs is None:
            self._probs = self.sampling.probs(self.logits)
        return self._probs

    def probs_at(self, rows: Tensor) -> Tensor:
        """float32 [B, V]: the distribution at one place of each row. rows: int64 [B], the places. A
        tree has many more places than a walk through it visits."""
        return self.sampling.probs(self.logits_at(rows))

    def logits_at(self, rows: Tensor) -> Tensor:
        """[B, V]: the processed logits at one place per row."""
        return self.logits[torch.arange(len(rows), device=rows.device), rows]

    def peaks_at(self, places: Tensor) -> Tensor:
        """[B, P]: the largest processed logit at some places of each row, int64 [B, P]. It is not
        finite if the model's logits are NaN or the processors mask all tokens."""
        if places.shape[1] >= self.logits.shape[1]:
            return self.logits.amax(-1).gather(1, places)
        rows_B1 = torch.arange(len(places), device=places.device)[:, None]
        return self.logits[rows_B1, places].amax(-1)

    def pick(self, uniforms: Tensor) -> Tensor:
        """int64 [B, N+1]: the token that the target picks at every place (greedy: the argmax)."""
        return self.sampling.pick(self.logits, uniforms)
