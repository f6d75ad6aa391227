"""Heads that do not see the tokens of earlier heads: Medusa's and Blockwise's.

Medusa (2401.10774): each head is a few residual blocks and an output layer. Blockwise parallel
decoding (1811.03115, section 6): one hidden layer for all heads.

Shapes: B rows, F features of a token, D heads, d ≤ D of them, H hidden size, V' draft vocabulary.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedModel

from decode.draft import Contexts
from decode.drafters import DRAFTERS
from decode.drafters.trained import ParallelGrowth
from decode.draw.sampling import Sampling
from decode.shapes import Growth
from heads.heads_drafter import HeadsDrafter
from heads.heads_module import HEADS, HeadBatch, Heads, Prediction, trained_positions
from heads.layers.layer_config import feed_forward_size
from heads.options import BlockwiseOptions, MedusaOptions


class ParallelHeads(Heads):
    """Heads that read only the features of one token. A subclass defines only `states`."""

    replayed_from = "draft"

    @abstractmethod
    def states(self, features: Tensor, depths: Sequence[int]) -> Tensor:
        """[n, d, H]: the states for features [n, F]. depths: which of the heads 1 … D."""

    def predictions(self, batch: HeadBatch, depths: Sequence[int]) -> Iterator[Prediction]:
        trained = {depth: trained_positions(batch.loss_mask, depth) for depth in depths}
        # All heads read most tokens, so shared parts are computed once per token.
        read = reduce(torch.logical_or, trained.values())
        features = torch.cat([batch.features[layer][read] for layer in self.captured_layers], -1)
        states = self.states(features.to(self.dtype), depths)
        for column, (depth, positions) in enumerate(trained.items()):
            yield Prediction(depth, positions, states[positions[read], column])


class ParallelHeadsDrafter(HeadsDrafter):
    """Drafts with all heads at once, from the hidden states of the last token that has any.

    The head of a depth predicts the children at this depth. It does not depend on the token of the
    parent node.
    """

    heads: ParallelHeads

    def growth(self, contexts: Contexts, sampling: Sampling, max_depth: int) -> Growth:
        heads = self.heads
        states = heads.states(self.newest_features, range(1, max_depth + 1))
        logits = heads.output.logits(states)
        return ParallelGrowth(contexts, sampling, self.vocab_size, heads.vocabulary, logits)


class _ResidualLayer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + silu(self.linear(x))


@HEADS.register("medusa")
class MedusaHeads(ParallelHeads):
    """Head k is softmax(W₂ · (SiLU(W₁·h) + h)), equation 1.

    W₁ starts as 0 and W₂ as the target's output layer. So every head starts as the target's
    next-token distribution.
    """

    joint_weight = 0.2

    def __init__(
        self, options: MedusaOptions, model: PreTrainedModel, vocabulary: Tensor | None = None
    ) -> None:
        super().__init__(options, options.heads, model, vocabulary)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(_ResidualLayer(self.hidden_size) for _ in range(options.layers)))
            for _ in range(options.heads)
        )

    @torch.no_grad()
    def init_weights(self, model: PreTrainedModel) -> None:
        super().init_weights(model)
        for parameter in self.blocks.parameters():
            parameter.zero_()

    def loss_weights(self, uniform: float) -> dict[int, float]:
        return {k: self.options.decay**k for k in range(1, self.depth + 1)}

    def states(self, features: Tensor, depths: Sequence[int]) -> Tensor:
        blocks = [self.blocks[depth - 1] for depth in depths]
        return torch.stack([self.recomputed(block, features) for block in blocks], 1)


@DRAFTERS.register("medusa")
class MedusaDrafter(ParallelHeadsDrafter):
    """Drafts with Medusa heads, in any shape. The paper calibrates a static tree on a dev set."""


@HEADS.register("blockwise")
class BlockwiseHeads(ParallelHeads):
    """p₂ … p_k: one feed-forward network maps the target's state to (k − 1)·H numbers.

    The state itself is added to each part of size H. All heads share the vocabulary projection. The
    second linear layer starts as 0, so all heads start as p₁, the target.
    """

    def __init__(
        self, options: BlockwiseOptions, model: PreTrainedModel, vocabulary: Tensor | None = None
    ) -> None:
        super().__init__(options, options.k - 1, model, vocabulary)
        self.batch_parts = 1  # one network for all heads
        # The mean over p₁ … p_k gives the target's loss the same weight as each of the k − 1 heads.
        # The heads' loss weights, or their probabilities to be drawn, sum to 1.
        self.joint_weight = float(self.depth)
        width = options.hidden or feed_forward_size(model.config.get_text_config())
        self.up = nn.Linear(self.hidden_size, self.depth * width)
        self.down = nn.Linear(self.depth * width, self.depth * self.hidden_size)

    @torch.no_grad()
    def init_weights(self, model: PreTrainedModel) -> None:
        super().init_weights(model)
        self.up.reset_parameters()
        for parameter in self.down.parameters():
            parameter.zero_()

    def loss_weights(self, uniform: float) -> dict[int, float]:
        if self.options.sub_loss == "random":
            return {1 + int(uniform * self.depth): 1.0}
        return dict.fromkeys(range(1, self.depth + 1), 1 / self.depth)

    def states(self, features: Tensor, depths: Sequence[int]) -> Tensor:
        updates = self.down(self.up(features).relu()).unflatten(-1, (self.depth, self.hidden_size))
        return features[:, None] + torch.stack([updates[:, depth - 1] for depth in depths], 1)


@DRAFTERS.register("blockwise")
class BlockwiseDrafter(ParallelHeadsDrafter):
    """Drafts with blockwise heads. A chain is the block of the paper."""
