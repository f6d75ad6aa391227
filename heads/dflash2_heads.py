"""DFlash2: DFlash's block, with convolutions in its layers and a selector of its path.

There is no paper. The authors' code defines it (github.com/z-lab/dflash, `dflash/model.py`, August
2026), and vLLM and SGLang compute the same. The authors' training is not public. The loss here is
that of the library speculators: the stage's losses for the block's own logits, and the
cross-entropy of the selector over its candidates.

Convolutions: attention and the feed-forward network of a layer read states that are mixed with
those of the tokens before, inside a block, and so is what they write. Selector: the K likeliest
tokens of a place are its candidates. After the token p, candidate c has the logit
U[c] + ⟨A[p] ⊙ W·h, B[c]⟩, where h is the state of the place and U its logits.

Shapes: B rows, n tokens, d depths, A anchors of a text, S tokens of a block, H hidden size, G
groups of channels, R rank, K candidates, V vocabulary, V' draft vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, pad
from transformers import LlamaConfig, PreTrainedModel

from decode.base.errors import UserError
from decode.draft import Contexts
from decode.drafters import DRAFTERS
from decode.drafters.trained import ParallelGrowth
from decode.draw.sampling import Sampling
from decode.model.forward.attention_mask import Attend
from decode.model.forward.rotations import Rotation
from decode.shapes import Growth
from distill.chunked_loss import at_least_float32
from heads.dflash_heads import DFlashDrafter, DFlashHeads
from heads.heads_module import HEADS, Prediction, shift_left
from heads.layers.block_layer import BlockLayer
from heads.options import DFlash2Options

# The predictions whose logits exist at once when candidates are chosen in training.
CHUNK = 256
# What the logits of tokens that are no candidates lose. Their q is 0. If a constraint forbids all
# candidates, the likeliest of the others is drafted.
FAR = 1e4


class BlockConvolution(nn.Module):
    """Two convolutions over the tokens of each block, before and after a part of a layer.

    Token t gets Σ_j (k_j + δ_j) ⊙ x_{t − j} for j < `kernel`. Tokens before the block count as 0.
    k is learnt for each channel. δ comes from the state that the first convolution reads, one
    number for each group of channels. Engines know the names.
    """

    def __init__(self, size: int, options: DFlash2Options) -> None:
        super().__init__()
        self.block, self.kernel, self.group = options.block, options.kernel, options.group
        self.base_kernel = nn.Parameter(torch.empty(2, options.kernel, size))
        numbers = 2 * options.kernel * (size // options.group)
        self.kernel_projection = nn.Linear(size, numbers, bias=False)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Both convolutions change nothing."""
        self.base_kernel.zero_()
        self.base_kernel[:, 0] = 1.0
        self.kernel_projection.weight.zero_()

    def forward(self, x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """[B, A·S, H] → [B, A·S, H]."""
        first, second = self.kernel_projection(x).unflatten(-1, (2, self.kernel, -1)).unbind(-3)
        return self._mixed(part(self._mixed(x, 0, first)), 1, second)

    def _mixed(self, x: Tensor, side: int, change: Tensor) -> Tensor:
        """change: [B, A·S, kernel, G]."""
        blocks = x.unflatten(1, (-1, self.block)).unflatten(-1, (-1, self.group))
        base = self.base_kernel[side].to(x.dtype).unflatten(-1, (-1, self.group))
        kernel = base + change.unflatten(1, (-1, self.block))[..., None]
        mixed = torch.zeros_like(blocks)
        for back in range(self.kernel):
            before = pad(blocks, (0, 0, 0, 0, back, 0))[:, :, : self.block]
            mixed = mixed + kernel[:, :, :, back] * before
        return mixed.flatten(-2).flatten(1, 2)


class ConvolvedLayer(BlockLayer):
    """A layer of DFlash with convolutions around attention and the feed-forward network. The
    context is not convolved."""

    def __init__(self, config: LlamaConfig, options: DFlash2Options) -> None:
        super().__init__(config)
        self.attention_conv = BlockConvolution(config.hidden_size, options)
        self.mlp_conv = BlockConvolution(config.hidden_size, options)

    def init_weights(self, spread: float) -> None:
        super().init_weights(spread)
        self.attention_conv.init_weights()
        self.mlp_conv.init_weights()

    def forward(self, states: Tensor, turns: Rotation, attend: Attend) -> Tensor:
        def attention(x: Tensor) -> Tensor:
            update: Tensor = self.self_attn(x, turns, attend)
            return update

        states = states + self.attention_conv(self.input_layernorm(states), attention)
        update: Tensor = self.mlp_conv(self.post_attention_layernorm(states), self.mlp)
        return states + update


class CandidateSelector(nn.Module):
    """A, B and W of the selector. Engines know the names."""

    def __init__(self, size: int, vocab_size: int, rank: int, rows: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(rows, rank))
        self.hidden_projection = nn.Linear(size, rank, bias=False)

    def added(self, projected: Tensor, before: Tensor, successors: Tensor) -> Tensor:
        """[..., K]: what candidates get after the tokens `before`, int64 [...].

        projected: [..., R], W·h. successors: [..., K, R], B of the candidates.
        """
        context = self.predecessor_codebook[before] * projected
        return (successors * context[..., None, :]).sum(-1)


@HEADS.register("dflash2")
class DFlash2Heads(DFlashHeads):
    """ "Head" d is the place d tokens after the anchor, as in DFlash.

    At first the convolutions change nothing, and the selector adds nothing. So these heads start as
    DFlash's. The figures that a training logs are those of the block's own logits.

    Raises UserError for a group that does not divide H, and more candidates than V'.
    """

    # The selector learns the text's tokens. Of a draft it would learn the rejected ones.
    replayed_from = ""

    def __init__(
        self, options: DFlash2Options, model: PreTrainedModel, vocabulary: Tensor | None = None
    ) -> None:
        super().__init__(options, model, vocabulary)
        if self.hidden_size % options.group:
            raise UserError(
                f"group is {options.group}, but the target has {self.hidden_size} hidden units; "
                "expected a divisor of that"
            )
        if options.candidates > self.rows:
            raise UserError(
                f"candidates is {options.candidates}, but these heads draft {self.rows} tokens; "
                "expected at most that"
            )
        self.candidate_selector = CandidateSelector(
            self.hidden_size, self.vocab_size, options.rank, self.rows
        )

    def make_layer(self) -> BlockLayer:
        return ConvolvedLayer(self.config, self.options)

    @torch.no_grad()
    def init_weights(self, model: PreTrainedModel) -> None:
        super().init_weights(model)
        selector = self.candidate_selector
        for weight in (selector.predecessor_codebook, selector.hidden_projection.weight):
            weight.normal_(std=self.config.initializer_range)
        selector.successor_codebook.zero_()

    def prediction(
        self, depth: int, positions: Tensor, input_ids: Tensor, *read: Tensor
    ) -> Prediction:
        (states,) = read
        before = shift_left(input_ids, depth)[positions]
        labels = self.labels(depth, positions, input_ids)
        losses = self.recomputed(self.selector_losses, states, before, labels)
        weight = self.options.selector_weight
        return Prediction(depth, positions, states, extra_loss=weight * losses)

    def selector_losses(self, states: Tensor, before: Tensor, labels: Tensor) -> Tensor:
        """float32 [n]: the cross-entropy of each label among the candidates of its place. A label
        that is not among them takes the place of the last one. It is 0 for a label of −100.

        states: [n, H]. before, labels: int64 [n], the token before, and the output row.
        """
        read, weight, bias = self.output.last_product(1, states)
        with torch.no_grad():
            parts = (linear(part, weight, bias) for part in read.split(CHUNK))
            rows = torch.cat([part.topk(self.options.candidates).indices for part in parts])
            lacking = (rows != labels[:, None]).all(1) & (labels >= 0)
            rows[:, -1] = torch.where(lacking, labels, rows[:, -1])
            found = rows == labels[:, None]
            right = torch.where(labels < 0, -100, found.long().argmax(1))
        scores = (weight[rows] @ read[..., None])[..., 0]
        if bias is not None:
            scores = scores + bias[rows]
        selector = self.candidate_selector
        projected, successors = selector.hidden_projection(states), selector.successor_codebook
        scores = scores + selector.added(projected, before, successors[rows])
        return cross_entropy(scores.to(at_least_float32(scores.dtype)), right, reduction="none")


@DRAFTERS.register("dflash2")
class DFlash2Drafter(DFlashDrafter):
    """Drafts in any shape. The candidates of a place are the same for all nodes at its depth. Their
    logits depend on the token before."""

    heads: DFlash2Heads

    def growth(self, contexts: Contexts, sampling: Sampling, max_depth: int) -> Growth:
        return _Growth(self, contexts, sampling, max_depth)


class _Growth(ParallelGrowth):
    """projected: [B, d, R]. candidates: int64 [B, d, K]. successors: [B, d, K, R]. last: int64
    [B], the last token of the text."""

    def __init__(
        self, drafter: DFlash2Drafter, contexts: Contexts, sampling: Sampling, max_depth: int
    ) -> None:
        heads, self.selector = drafter.heads, drafter.heads.candidate_selector
        states, self.last = drafter.places(contexts, max_depth)
        logits = heads.output.logits(states).float()
        unary, self.candidates = logits.topk(heads.options.candidates)
        logits = (logits - FAR).scatter(-1, self.candidates, unary)
        self.projected = self.selector.hidden_projection(states)
        self.successors = self.selector.successor_codebook[self.candidates]
        super().__init__(contexts, sampling, drafter.vocab_size, heads.vocabulary, logits)

    def _first(self) -> Tensor:
        return self._selected(self.last[:, None], lambda values: values[:, :1])[:, 0]

    def _extend(self, count: int) -> Tensor:
        return self._selected(self.fed[:, -count:], lambda values: self.of_children(values, count))

    def _selected(self, before: Tensor, at: Callable[[Tensor], Any]) -> Tensor:
        """[B, n, V']: the logits after the tokens `before`, int64 [B, n]. at: [B, n, …] of values
        [B, d, …]."""
        added = self.selector.added(at(self.projected), before, at(self.successors))
        selected: Tensor = at(self.logits).scatter_add(-1, at(self.candidates), added.float())
        return selected
