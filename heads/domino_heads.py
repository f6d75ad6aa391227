"""Domino (2605.29707): DFlash's block, and a GRU over the tokens of the draft.

DFlash predicts all places of a block at once, here each from the token of the block before it. The
GRU reads the anchor and then the tokens of the draft, by the target's embeddings. From its state
and the state of a place, a product of low rank adds to the logits of the place. So a place depends
on all tokens drafted before it. Nothing is added to the first place, which follows the anchor.

Shapes: B rows, n tokens, d depths, A anchors of a text, S tokens of a block, H hidden size, G size
of the GRU's state, R rank, V' draft vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.draft import Contexts
from decode.drafters import DRAFTERS
from decode.drafters.trained import ParallelGrowth
from decode.draw.sampling import Sampling
from decode.shapes import Growth
from heads.dflash_heads import DFlashDrafter, DFlashHeads
from heads.heads_module import HEADS, Prediction
from heads.options import DominoOptions


class PrefixGRU(nn.Module):
    """A GRU without biases, one token at a time. Engines know the names."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * hidden, size))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * hidden, hidden))

    def forward(self, embedded: Tensor, states: Tensor | None = None) -> Tensor:
        """[n, G]: the states after tokens [n, H]. states: [n, G], before them; None: nothing was
        read."""
        if states is None:
            states = embedded.new_zeros(len(embedded), self.weight_hh_l0.shape[1])
        read: Tensor = torch.gru_cell(embedded, states, self.weight_ih_l0, self.weight_hh_l0)
        return read


@HEADS.register("domino")
class DominoHeads(DFlashHeads):
    """ "Head" d is the place d tokens after the anchor, read from token d − 1 of the block.

    The stage's losses are those of the logits with the GRU after the text's own tokens. The
    cross-entropy of the block alone is added with a weight of its own. In the paper that weight
    falls from 1 to 0 in the course of the training, and that of the other rises from 0 to 1.
    At first the GRU adds nothing.
    """

    read_directly = ("output", "embed_proj.2")
    first_slot = 0
    # The block alone learns the text's tokens. Of a draft it would learn the rejected ones.
    replayed_from = ""

    def __init__(
        self, options: DominoOptions, model: PreTrainedModel, vocabulary: Tensor | None = None
    ) -> None:
        super().__init__(options, model, vocabulary)
        self.prefix_gru = PrefixGRU(self.hidden_size, options.gru)
        self.embed_proj: Any = nn.Sequential(
            nn.Linear(self.hidden_size + options.gru, options.rank, bias=False),
            nn.SiLU(),
            nn.Linear(options.rank, self.rows, bias=False),
        )

    @torch.no_grad()
    def init_weights(self, model: PreTrainedModel) -> None:
        super().init_weights(model)
        for weight in self.prefix_gru.parameters():
            nn.init.uniform_(weight, -(self.options.gru**-0.5), self.options.gru**-0.5)
        self.embed_proj[0].weight.normal_(std=self.config.initializer_range)
        self.embed_proj[2].weight.zero_()

    def after(self, tokens: Tensor, prefixes: Tensor | None = None) -> Tensor:
        """[..., G]: the GRU's states after tokens, int64 [...], and prefixes [..., G] before them.
        None: nothing is before them."""
        embedded = self.embeddings(tokens.flatten()).to(self.dtype)
        before = None if prefixes is None else prefixes.flatten(0, -2)
        read: Tensor = self.prefix_gru(embedded, before)
        return read.unflatten(0, tokens.shape)

    def added_rows(self, states: Tensor, prefixes: Tensor) -> Tensor:
        """[..., R]: the rows whose product with the last weight is added to the logits of places.
        states: [..., H], of the places. prefixes: [..., G], after the tokens before them."""
        both = torch.cat([states, prefixes.to(states.dtype)], -1)
        rows: Tensor = self.embed_proj[:2](both)
        return rows

    def read_places(self, blocks: Tensor, anchors: Tensor, input_ids: Tensor) -> tuple[Tensor, ...]:
        """With the rows that are added after the text's tokens, [B, A, D, R]."""
        tokens = self.tokens_from(anchors, input_ids, 0)
        prefixes = [self.after(tokens[..., 0])]
        for token in tokens[..., 1:].unbind(-1):
            prefixes.append(self.after(token, prefixes[-1]))
        return blocks, self.added_rows(blocks, torch.stack(prefixes, 2))

    def prediction(
        self, depth: int, positions: Tensor, input_ids: Tensor, *read: Tensor
    ) -> Prediction:
        states, rows = read
        labels = self.labels(depth, positions, input_ids)
        extra = self.options.base_weight * self.losses(states, None, labels)
        added = None if depth == 1 else (rows, self.embed_proj[2].weight)
        return Prediction(depth, positions, states, extra_loss=extra, added=added)


@DRAFTERS.register("domino")
class DominoDrafter(DFlashDrafter):
    """Drafts in any shape. A place depends on all tokens before it."""

    heads: DominoHeads

    def growth(self, contexts: Contexts, sampling: Sampling, max_depth: int) -> Growth:
        return _Growth(self, contexts, sampling, max_depth)


class _Growth(ParallelGrowth):
    """states: [B, d, H], of the places. prefixes: [B, 1 + m, G], after the anchor and after each
    fed node."""

    def __init__(
        self, drafter: DominoDrafter, contexts: Contexts, sampling: Sampling, max_depth: int
    ) -> None:
        self.heads = drafter.heads
        self.states, last = drafter.places(contexts, max_depth)
        logits = self.heads.output.logits(self.states)
        super().__init__(contexts, sampling, drafter.vocab_size, self.heads.vocabulary, logits)
        self.prefixes = self.heads.after(last[:, None])

    def _extend(self, count: int) -> Tensor:
        tokens = self.fed[:, -count:]
        if self.parents is None:
            for token in tokens.split(1, 1):
                self._read(token, self.prefixes[:, -1:])
        else:
            rows = torch.arange(self.rows, device=self.device)[:, None]
            self._read(tokens, self.prefixes[rows, self.parents + 1])
        states = self.of_children(self.states, count)
        added = self.heads.added_rows(states, self.prefixes[:, -count:])
        return super()._extend(count) + self.heads.embed_proj[2](added)

    def _read(self, tokens: Tensor, before: Tensor) -> None:
        self.prefixes = torch.cat([self.prefixes, self.heads.after(tokens, before)], 1)
