"""Hydra's heads (2402.05109): like Medusa's, but each head also reads the earlier draft tokens.

Shapes: B rows, n tokens, m nodes fed, F features of a token, H hidden size, D heads.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad, silu
from transformers import PreTrainedModel

from decode.contexts import Contexts
from decode.drafters import DRAFTERS
from decode.sampling import Sampling
from decode.trees.growth import Growth
from heads.base import HEADS, Given, HeadOptions, Prediction, ahead, trained_places
from heads.drafter import HeadsDrafter
from heads.embeddings import TokenHeads


class HydraOptions(HeadOptions):
    """Options of Hydra heads (2402.05109)."""

    type: Literal["hydra"] = "hydra"
    heads: int = Field(4, ge=1)
    """The number of heads."""
    layers: int = Field(1, ge=1)
    """The number of layers of each head's MLP."""
    decay: float = Field(1.0, gt=0, le=1)
    """The loss weight of head k is decay^(k − 1). In the paper all heads have the same weight."""


class _Block(nn.Module):
    """A layer of the MLP from `reads` to `size` numbers, with the skip connection `skip`.

    If both sizes are equal, `skip` is the identity.
    """

    def __init__(self, reads: int, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(reads, size)
        self.skip = nn.Identity() if reads == size else nn.Linear(reads, size)

    @torch.no_grad()
    def init_weights(self) -> None:
        for parameter in self.parameters():
            parameter.zero_()
        if isinstance(self.skip, nn.Linear):
            self.skip.weight[:, : self.skip.out_features] = torch.eye(self.skip.out_features)

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = self.skip(x)
        return kept + silu(self.linear(x))


@HEADS.register("hydra")
class HydraHeads(TokenHeads):
    """Head k reads the target's state at t and the embeddings of the tokens t + 1 … t + k.

    They are concatenated (section 3). Token t + 1 comes from the target, the others are draft
    tokens. In training all of them come from the text.

    With its init weights a head passes the state through and adds nothing. So each head starts as
    the target's next-token distribution, like Medusa's. (In the paper, the projection of the first
    layer starts at random.)
    """

    Options: ClassVar[type[HeadOptions]] = HydraOptions

    def __init__(
        self, options: HydraOptions, model: PreTrainedModel, vocabulary: Tensor | None = None
    ) -> None:
        super().__init__(options, options.heads, model, vocabulary)
        size = self.hidden_size
        self.blocks = nn.ModuleList(
            nn.Sequential(
                _Block((head + 2) * size, size),
                *(_Block(size, size) for _ in range(options.layers - 1)),
            )
            for head in range(options.heads)
        )

    @torch.no_grad()
    def init_weights(self, model: PreTrainedModel) -> None:
        super().init_weights(model)
        for block in self.blocks.modules():
            if isinstance(block, _Block):
                block.init_weights()

    def loss_weights(self, uniform: float) -> dict[int, float]:
        return {k: self.options.decay ** (k - 1) for k in range(1, self.depth + 1)}

    def in_context(self, features: Tensor) -> Tensor:
        """[B, T, H]: the states that the heads read, from the target's features [B, T, H]."""
        return features

    def states(self, features: Tensor, tokens: Tensor) -> Tensor:
        """[n, H]: the states of head d.

        features: [n, F], of one position each. tokens: int64 [n, d], the d tokens after it.
        """
        embedded = self.embeddings(tokens).flatten(1)
        read = torch.cat([features.to(self.dtype), embedded.to(self.dtype)], -1)
        made: Tensor = self.blocks[tokens.shape[1] - 1](read)
        return made

    def predictions(self, given: Given, depths: Sequence[int]) -> Iterator[Prediction]:
        features = self.in_context(
            torch.cat([given.features[layer] for layer in self.captured_layers], -1)
        )
        for depth in depths:
            places = trained_places(given.loss_mask, depth)
            after = [ahead(given.input_ids, by)[places] for by in range(1, depth + 1)]
            states = self.states(features[places], torch.stack(after, -1))
            yield Prediction(depth, places, states)


@DRAFTERS.register("hydra")
class HydraDrafter(HeadsDrafter):
    """Drafts with Hydra heads, in any shape. The paper calibrates a static tree on a dev set."""

    heads: HydraHeads

    def growth(self, contexts: Contexts, sampling: Sampling, deepest: int) -> Growth:
        return HydraGrowth(self, contexts, sampling)


class HydraGrowth(Growth):
    """Grows a draft from the newest states that the heads read in each row, [B, H]."""

    def __init__(self, drafter: HeadsDrafter, contexts: Contexts, sampling: Sampling) -> None:
        heads, self.features = drafter.heads, drafter.last
        assert isinstance(heads, HydraHeads)
        super().__init__(
            contexts, sampling, self.features.device, drafter.vocab_size, heads.vocabulary
        )
        self.heads = heads
        rows = torch.arange(self.rows)
        last = torch.as_tensor(contexts.tokens)[rows, torch.as_tensor(contexts.lengths) - 1]
        self.last = last.to(self.device)  # int64 [B]: the token after the one with the features

    def _first(self) -> Tensor:
        return self._of(self.features, self.last[:, None])

    def _extend(self, count: int) -> Tensor:
        on_path = self.on_path(count)
        fed = on_path.shape[2]
        depths = on_path.sum(2)  # [B, n]
        # Ancestors are fed before their children, so ascending numbers go from the root down.
        order = torch.where(on_path, torch.arange(fed, device=self.device), fed).sort(2).values
        paths = pad(self.fed, (0, 1))[:, None].expand(-1, count, -1).gather(2, order)
        paths = torch.cat([self.last[:, None, None].expand(-1, count, -1), paths], 2)
        features = self.features[:, None].expand(-1, count, -1)
        logits = features.new_zeros(self.rows, count, self.heads.rows)
        for depth in depths.unique().tolist():
            here = depths == depth
            logits[here] = self._of(features[here], paths[here][:, : depth + 1])
        return logits

    def _of(self, features: Tensor, tokens: Tensor) -> Tensor:
        states = self.heads.states(features, tokens)
        return self.heads.output.at(tokens.shape[1], states)
