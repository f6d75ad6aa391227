"""DSpark (2607.05147): DFlash's block, a Markov head on each place, and an estimate of acceptance.

The block predicts all places at once. The Markov head then adds to the logits of a place what the
token before it tells. The confidence head estimates how likely the target accepts the place, from
the same state and the token before it. It never sees the token of the place itself. So a chain may
end where it says, and the text keeps the target's distribution.

Shapes: B rows, n tokens, d depths, H hidden size, R rank, V vocabulary, V' draft vocabulary.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.draft import Contexts
from decode.drafters import DRAFTERS
from decode.drafters.trained import ParallelGrowth
from decode.draw.sampling import Sampling
from decode.shapes import Growth
from heads.dflash_heads import DFlashDrafter, DFlashHeads
from heads.heads_module import HEADS, Prediction, shift_left
from heads.options import DSparkOptions


class MarkovHead(nn.Module):
    """W₂ᵀ·W₁[x]: what token x adds to the logits of the next token. Engines know the names."""

    def __init__(self, vocab_size: int, rank: int, rows: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, rows, bias=False)


class ConfidenceHead(nn.Module):
    """w·[state; W₁[x]] + b."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)


@HEADS.register("dspark")
class DSparkHeads(DFlashHeads):
    """ "Head" d is the place d tokens after the anchor, read from token d − 1 of the block.

    At first the Markov head adds nothing and the confidence is ½.
    """

    read_directly = ("output", "markov_head.markov_w2")
    first_slot = 0

    def __init__(
        self, options: DSparkOptions, model: PreTrainedModel, vocabulary: Tensor | None = None
    ) -> None:
        super().__init__(options, model, vocabulary)
        vocab_size = len(model.get_input_embeddings().weight)
        self.markov_head = MarkovHead(vocab_size, options.rank, self.rows)
        self.estimates = options.confidence
        if self.estimates:
            self.confidence_head = ConfidenceHead(self.hidden_size + options.rank)

    @torch.no_grad()
    def init_weights(self, model: PreTrainedModel) -> None:
        super().init_weights(model)
        self.markov_head.markov_w1.weight.normal_(std=self.config.initializer_range)
        self.markov_head.markov_w2.weight.zero_()
        if self.estimates:
            for parameter in self.confidence_head.parameters():
                parameter.zero_()

    def confidence(self, states: Tensor, embedded: Tensor) -> Tensor:
        """[...]: the logit of the estimated acceptance. states: [..., H]. embedded: [..., R]."""
        both = torch.cat([states, embedded.to(states.dtype)], -1)
        logit: Tensor = self.confidence_head.proj(both)
        return logit[..., 0]

    def prediction(
        self, depth: int, positions: Tensor, input_ids: Tensor, *read: Tensor
    ) -> Prediction:
        (states,) = read
        embedded = self.markov_head.markov_w1(shift_left(input_ids, depth)[positions])
        return Prediction(
            depth,
            positions,
            states,
            added=(embedded, self.markov_head.markov_w2.weight),
            confidence=self.confidence(states, embedded) if self.estimates else None,
        )


@DRAFTERS.register("dspark")
class DSparkDrafter(DFlashDrafter):
    """Drafts in any shape. A place depends on the token before it, and on no earlier one.

    Chains may end by the confidence head: policy `reach`.
    """

    heads: DSparkHeads

    @property
    def estimates(self) -> bool:
        return self.heads.estimates

    def growth(self, contexts: Contexts, sampling: Sampling, max_depth: int) -> Growth:
        return _Growth(self, contexts, sampling, max_depth)


class _Growth(ParallelGrowth):
    """states: [B, d, H], of the places. last: int64 [B], the last token of the text."""

    def __init__(
        self, drafter: DSparkDrafter, contexts: Contexts, sampling: Sampling, max_depth: int
    ) -> None:
        heads = drafter.heads
        self.states, self.last = drafter.places(contexts, max_depth)
        self.heads = heads
        logits = heads.output.logits(self.states)
        super().__init__(contexts, sampling, drafter.vocab_size, heads.vocabulary, logits)

    def _first(self) -> Tensor:
        return super()._first() + self._added(self.last)

    def _extend(self, count: int) -> Tensor:
        return super()._extend(count) + self._added(self.fed[:, -count:])

    def estimate(self) -> Tensor | None:
        if not self.heads.estimates:
            return None
        place = self.fed.shape[1]
        before = self.fed[:, -1] if place else self.last
        embedded = self.heads.markov_head.markov_w1(before)
        return self.heads.confidence(self.states[:, place], embedded).float().sigmoid()

    def _added(self, tokens: Tensor) -> Tensor:
        """[..., V']: what tokens [...] add to the logits after them."""
        head = self.heads.markov_head
        added: Tensor = head.markov_w2(head.markov_w1(tokens))
        return added
