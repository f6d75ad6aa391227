"""XPress (2608.02438): DFlash's block, and a causal refiner of its places.

DFlash predicts all places of a block at once. The refiner adds to the logits of a place what the
tokens before it in the block tell: one vector of each token of the block, made of its state, of the
mean state of the block and of the token before it, is mixed with those of the tokens before, and
read out. So a place depends on all tokens drafted before it, and on none after it.

Engines resolve a greedy block in K passes over all places, each with the tokens of the pass before
(Jacobi). The tokens of the passes no longer change after at most as many passes as places, and are
then those of drafting place by place. Our loop drafts place by place: the refiner costs little
beside the target, any shape works, and q is the distribution that a token is drawn from.

Shapes: B rows, n tokens, d depths, A anchors of a text, S tokens of a block, H hidden size, R rank,
V vocabulary, V' draft vocabulary.
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedModel

from decode.base.device import to_device
from decode.draft import Contexts
from decode.drafters import DRAFTERS
from decode.drafters.trained import ParallelGrowth
from decode.draw.sampling import Sampling
from decode.shapes import Growth
from heads.dflash_heads import CHUNK, DFlashDrafter, DFlashHeads
from heads.heads_module import HEADS, Prediction
from heads.options import XPressOptions


class Refiner(nn.Module):
    """The refiner of a block. At first it adds nothing. Engines know the names."""

    def __init__(self, size: int, vocab_size: int, options: XPressOptions, rows: int) -> None:
        super().__init__()
        rank, width = options.rank, options.rank * options.ratio
        self.token_embed = nn.Embedding(vocab_size, rank)
        self.down_h = nn.Linear(size, rank, bias=False)
        self.down_g = nn.Linear(size, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.empty(rank, options.block, options.block))
        self.mlp_gate = nn.Linear(rank, width, bias=False)
        self.mlp_up = nn.Linear(rank, width, bias=False)
        self.mlp_down = nn.Linear(width, rank, bias=False)
        self.readout = nn.Linear(rank, rows, bias=False)

    def of_states(self, states: Tensor) -> Tensor:
        """[..., S, 2R]: what the states of a block tell, [..., S, H]."""
        mean = states.mean(-2, keepdim=True).expand_as(states)
        return torch.cat([self.down_h(states), self.down_g(mean)], -1)

    def vectors(self, known: Tensor, before: Tensor) -> Tensor:
        """[..., R]: the vectors of tokens. known: [..., 2R], of `of_states`. before: int64 [...],
        the tokens before them."""
        embedded = self.token_embed(before).to(known.dtype)
        made: Tensor = self.in_proj(torch.cat([known, embedded], -1))
        return made

    def read(self, mixed: Tensor) -> Tensor:
        """[..., R]: the rows whose product with `readout` is added to the logits."""
        update: Tensor = self.mlp_down(silu(self.mlp_gate(mixed)) * self.mlp_up(mixed))
        return mixed + update

    def of_blocks(self, known: Tensor, before: Tensor) -> Tensor:
        """[B, A, S, R]: as `read`, for all tokens of blocks. known: [B, A, S, 2R]. before: int64
        [B, A, S]."""
        vectors = self.vectors(known, before)
        mixed = torch.einsum("rkj,bajr->bakr", self.mix_l.tril().to(vectors.dtype), vectors)
        return self.read(vectors + mixed)


@HEADS.register("xpress")
class XPressHeads(DFlashHeads):
    """ "Head" d is the place d tokens after the anchor, as in DFlash.

    The stage's losses are those of the refined logits after the text's own tokens. The
    cross-entropy is added, with weights of their own, for the logits of the block alone, and for
    those after the tokens of `passes` Jacobi passes, as engines draft. A pass gives no gradient to
    the one before it. The weights are those of the library speculators, which has the same losses
    in all three terms, and starts from random weights of the read-out.
    """

    read_directly = ("output", "refiner_head.readout")
    # The passes learn the text's tokens. Of a draft they would learn the rejected ones.
    replayed_from = ""

    def __init__(
        self, options: XPressOptions, model: PreTrainedModel, vocabulary: Tensor | None = None
    ) -> None:
        super().__init__(options, model, vocabulary)
        self.refiner_head = Refiner(self.hidden_size, self.vocab_size, options, self.rows)

    @torch.no_grad()
    def init_weights(self, model: PreTrainedModel) -> None:
        super().init_weights(model)
        for weight in self.refiner_head.parameters():
            weight.normal_(std=self.config.initializer_range)
        self.refiner_head.mix_l.zero_()
        self.refiner_head.readout.weight.zero_()

    def read_places(self, blocks: Tensor, anchors: Tensor, input_ids: Tensor) -> tuple[Tensor, ...]:
        """With the rows of the refiner, [B, A, D, R], after the text's tokens and after those of
        each pass."""
        refiner = self.refiner_head
        known = refiner.of_states(blocks)
        before = self.tokens_from(anchors, input_ids, -1)
        rows, guesses = [refiner.of_blocks(known, before)], self.likeliest(blocks, None)
        for _ in range(self.options.passes):
            # The tokens before the anchor and before the first place are the text's.
            guesses = torch.cat([before[..., :2], guesses[..., 1:-1]], -1)
            rows.append(refiner.of_blocks(known, guesses))
            guesses = self.likeliest(blocks, rows[-1])
        return tuple(x[:, :, self.first_slot :] for x in (blocks, *rows))

    @torch.no_grad()
    def likeliest(self, blocks: Tensor, rows: Tensor | None) -> Tensor:
        """int64 [B, A, S]: the likeliest tokens of the states [B, A, S, H]. rows: [B, A, S, R], of
        the refiner; None: without it."""
        parts = blocks.flatten(0, 2).split(CHUNK)
        added = [None] * len(parts) if rows is None else rows.flatten(0, 2).split(CHUNK)
        found = [self.place_logits(*part).argmax(-1) for part in zip(parts, added, strict=True)]
        ids = torch.cat(found).view(blocks.shape[:-1])
        return ids if self.vocabulary is None else self.vocabulary[ids]

    def place_logits(self, states: Tensor, added: Tensor | None = None) -> Tensor:
        """added: [n, R], the refiner's rows."""
        logits = super().place_logits(states)
        return logits if added is None else logits + self.refiner_head.readout(added)

    def prediction(
        self, depth: int, positions: Tensor, input_ids: Tensor, *read: Tensor
    ) -> Prediction:
        states, rows, *passes = read
        labels = self.labels(depth, positions, input_ids)
        options = self.options
        extra = options.base_weight * self.losses(states, None, labels)
        for of_pass in passes:
            share = options.pass_weight / len(passes)
            extra = extra + share * self.losses(states, of_pass, labels)
        added = (rows, self.refiner_head.readout.weight)
        return Prediction(depth, positions, states, extra_loss=extra, added=added)


@DRAFTERS.register("xpress")
class XPressDrafter(DFlashDrafter):
    """Drafts in any shape. A place depends on all tokens before it."""

    heads: XPressHeads

    def growth(self, contexts: Contexts, sampling: Sampling, max_depth: int) -> Growth:
        return _Growth(self, contexts, sampling, max_depth)


class _Growth(ParallelGrowth):
    """known: [B, d, 2R], of the places. vectors: [B, 2 + m, R], of the anchor, of the first place,
    and of the place after each fed node. slots: int64 [B, 2 + m], their tokens of the block."""

    def __init__(
        self, drafter: XPressDrafter, contexts: Contexts, sampling: Sampling, max_depth: int
    ) -> None:
        heads, self.refiner = drafter.heads, drafter.heads.refiner_head
        states, last = drafter.blocks(contexts)
        known = self.refiner.of_states(states)
        logits = heads.output.logits(states[:, 1 : max_depth + 1])
        super().__init__(contexts, sampling, drafter.vocab_size, heads.vocabulary, logits)
        places = np.maximum(contexts.lengths[:, None] - 2, 0)
        before = to_device(np.take_along_axis(contexts.tokens, places, axis=1), self.device)
        self.known = known[:, 1 : max_depth + 1]
        self.vectors = self.refiner.vectors(known[:, :2], torch.cat([before, last[:, None]], 1))
        self.slots = torch.arange(2, device=self.device).expand(self.rows, -1)

    def _first(self) -> Tensor:
        roots = self.fed.new_ones(self.rows, 1, 2, dtype=torch.bool)
        return super()._first() + self._added(1, roots)[:, 0]

    def _extend(self, count: int) -> Tensor:
        known = self.of_children(self.known, count)
        path = self.on_path(count)
        vectors = self.refiner.vectors(known, self.fed[:, -count:])
        self.vectors = torch.cat([self.vectors, vectors], 1)
        self.slots = torch.cat([self.slots, path.sum(2) + 1], 1)
        roots = path.new_ones(self.rows, count, 2)
        return super()._extend(count) + self._added(count, torch.cat([roots, path], 2))

    def _added(self, count: int, mixed: Tensor) -> Tensor:
        """[B, n, V']: what the refiner adds to the logits of the last n places. mixed: bool
        [B, n, 2 + m], the vectors that it mixes for each."""
        weights = self.refiner.mix_l.permute(1, 2, 0)[
            self.slots[:, -count:, None], self.slots[:, None]
        ]
        weights = (weights * mixed[..., None]).to(self.vectors.dtype)
        sums = (weights * self.vectors[:, None]).sum(2)
        added: Tensor = self.refiner.readout(self.refiner.read(self.vectors[:, -count:] + sums))
        return added
