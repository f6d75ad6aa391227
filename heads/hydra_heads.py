"""Hydra's heads (2402.05109): like Medusa's, but each head also reads the earlier draft tokens.

Hydra++ (section 4) puts them on an extra layer that attends to the whole text.

Shapes: B rows, T tokens of a text, n tokens, m nodes fed, F features of a token, H hidden size,
D heads.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from decode.base.device import to_device
from decode.draft import Contexts
from decode.drafters import DRAFTERS
from decode.draw.sampling import Sampling
from decode.shapes import Growth
from distill.flops import TextFlops, attention_flops, products_flops
from heads.attending_heads import AttendingHeads
from heads.heads_drafter import AttendingDrafter, HeadsDrafter
from heads.heads_module import (
    HEADS,
    HeadBatch,
    Prediction,
    Replayed,
    TokenHeads,
    shift_left,
    trained_positions,
)
from heads.layers.layer_config import layer_config
from heads.layers.llama_layer import Attend, DraftLayer, Rotary, init_layer
from heads.layers.unrolled_attention import causal_attention
from heads.options import HydraOptions, HydraPlusOptions


class _SkipLayer(nn.Module):
    """A layer of the MLP from `input_size` to `size` numbers, with the skip connection `skip`.

    If both sizes are equal, `skip` is the identity.
    """

    def __init__(self, input_size: int, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(input_size, size)
        self.skip = nn.Identity() if input_size == size else nn.Linear(input_size, size)

    @torch.no_grad()
    def init_weights(self) -> None:
        for parameter in self.parameters():
            parameter.zero_()
        if isinstance(self.skip, nn.Linear):
            self.skip.weight[:, : self.skip.out_features] = torch.eye(self.skip.out_features)

    def forward(self, x: Tensor) -> Tensor:
        skipped: Tensor = self.skip(x)
        return skipped + silu(self.linear(x))


@HEADS.register("hydra")
class HydraHeads(TokenHeads):
    """Head k reads the target's state at t and the embeddings of the tokens t + 1 … t + k.

    They are concatenated (section 3). Token t + 1 comes from the target, the others are draft
    tokens. In training all of them come from the text.

    With its init weights a head passes the state through and adds nothing. So each head starts as
    the target's next-token distribution, like Medusa's. (In the paper, the projection of the first
    layer starts at random.)
    """

    replayed_from: ClassVar[Replayed] = "draft"

    def __init__(
        self, options: HydraOptions, model: PreTrainedModel, vocabulary: Tensor | None = None
    ) -> None:
        super().__init__(options, options.heads, model, vocabulary)
        size = self.hidden_size
        self.blocks = nn.ModuleList(
            nn.Sequential(
                _SkipLayer((head + 2) * size, size),
                *(_SkipLayer(size, size) for _ in range(options.layers - 1)),
            )
            for head in range(options.heads)
        )

    @torch.no_grad()
    def init_weights(self, model: PreTrainedModel) -> None:
        super().init_weights(model)
        for block in self.blocks.modules():
            if isinstance(block, _SkipLayer):
                block.init_weights()

    def input_states(self, features: Tensor) -> Tensor:
        """[B, T, H]: the states that the heads read, from the target's features [B, T, H]."""
        return features

    def states(self, features: Tensor, tokens: Tensor) -> Tensor:
        """[n, H]: the states of head d.

        features: [n, F], of one position each. tokens: int64 [n, d], the d tokens after it.
        """
        embedded = self.embeddings(tokens).flatten(1)
        inputs = torch.cat([features.to(self.dtype), embedded.to(self.dtype)], -1)
        states: Tensor = self.blocks[tokens.shape[1] - 1](inputs)
        return states

    def predictions(self, batch: HeadBatch, depths: Sequence[int]) -> Iterator[Prediction]:
        features = self.input_states(batch.of(self.captured_layers))
        for depth in depths:
            positions = trained_positions(batch.loss_mask, depth)
            tokens = [shift_left(batch.input_ids, i)[positions] for i in range(1, depth + 1)]
            states = self.recomputed(self.states, features[positions], torch.stack(tokens, -1))
            yield Prediction(depth, positions, states)


@DRAFTERS.register("hydra")
class HydraDrafter(HeadsDrafter):
    """Drafts with Hydra heads, in any shape. The paper calibrates a static tree on a dev set."""

    heads: HydraHeads

    def growth(self, contexts: Contexts, sampling: Sampling, max_depth: int) -> Growth:
        return HydraGrowth(self, contexts, sampling, self.newest_features)


class HydraGrowth(Growth):
    """Grows a draft from the newest states that the heads read in each row, [B, H]."""

    def __init__(
        self, drafter: HeadsDrafter, contexts: Contexts, sampling: Sampling, features: Tensor
    ) -> None:
        heads, self.features = drafter.heads, features
        assert isinstance(heads, HydraHeads)
        super().__init__(
            contexts, sampling, self.features.device, drafter.vocab_size, heads.vocabulary
        )
        self.heads = heads
        # int64 [B]: the token after the one with the features
        self.last_tokens = contexts.last_tokens(self.device)[:, 0]

    def _first(self) -> Tensor:
        return self._logits(self.features, self.last_tokens[:, None])

    def _extend(self, count: int) -> Tensor:
        fed = self.fed.shape[1]
        if self.ancestors is None:
            tokens = torch.cat([self.last_tokens[:, None], self.fed], 1)
            ends = range(fed - count + 2, fed + 2)
            return torch.stack([self._logits(self.features, tokens[:, :end]) for end in ends], 1)
        # Ancestors are fed before their children, so ascending numbers go from the root down.
        number = torch.arange(fed, device=self.device)
        order = torch.where(self.on_path(count), number, fed).sort(2).values[..., : self.depth]
        paths = self.fed[:, None].expand(-1, count, -1).gather(2, order)
        paths = torch.cat([self.last_tokens[:, None, None].expand(-1, count, -1), paths], 2)
        features = self.features[:, None].expand(-1, count, -1)
        logits = self._logits(features.flatten(0, 1), paths.flatten(0, 1))
        return logits.unflatten(0, (self.rows, count))

    def _logits(self, features: Tensor, tokens: Tensor) -> Tensor:
        states = self.heads.states(features, tokens)
        return self.heads.output.at(tokens.shape[1], states)


class PrefixLayer(nn.Module):
    """A decoder layer after the target's last layer. It reads the target's features."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layer = DraftLayer(config, config.hidden_size)
        self._spread = config.initializer_range
        self._rotary = Rotary(config)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Set init weights with which the layer changes nothing."""
        self.input_layernorm.weight.fill_(1.0)
        init_layer(self.layer, self._spread)

    def forward(self, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return [B, n, H] for features [B, n, H]. positions: int64 [B, n] or [1, n]."""
        position_embeddings = self._rotary(positions, features)
        states: Tensor = self.layer(
            features, self.input_layernorm(features), position_embeddings, attend
        )
        return states


@HEADS.register("hydra_plus")
class HydraPlusHeads(HydraHeads, AttendingHeads):
    """Heads that read the output of the prefix layer at t instead of the target's state at t.

    The prefix layer attends to all of the target's states up to t. It starts with no effect and is
    trained with the heads.
    """

    replayed_from = "text"

    def __init__(
        self, options: HydraPlusOptions, model: PreTrainedModel, vocabulary: Tensor | None = None
    ) -> None:
        super().__init__(options, model, vocabulary)
        self.prefix = PrefixLayer(layer_config(model))
        self.batch_parts = self.depth + 1

    @torch.no_grad()
    def init_weights(self, model: PreTrainedModel) -> None:
        super().init_weights(model)
        self.prefix.init_weights()

    def body_flops(self) -> TextFlops:
        heads = TextFlops(per_prediction=products_flops(self.blocks))
        prefix = TextFlops(per_token=products_flops(self.prefix))
        width = self.prefix.layer.self_attn.q_proj.out_features
        return heads + prefix + attention_flops(width, trained=True)

    def input_states(self, features: Tensor) -> Tensor:
        positions = torch.arange(features.shape[1], device=features.device)[None]
        attend = partial(causal_attention, window=self.window)
        return self.recomputed(self.prefix, features.to(self.dtype), positions, attend)


@DRAFTERS.register("hydra_plus")
class HydraPlusDrafter(AttendingDrafter):
    """Drafts with Hydra++ heads, in any shape. The paper calibrates a static tree on a dev set."""

    heads: HydraPlusHeads

    def growth(self, contexts: Contexts, sampling: Sampling, max_depth: int) -> Growth:
        return HydraGrowth(self, contexts, sampling, self.newest(contexts))

    def layer(self, contexts: Contexts, columns: np.ndarray, states: Tensor) -> Tensor:
        attend = self.attention(columns[:, 0], columns.shape[1])
        positions = to_device(columns, states.device)
        outputs: Tensor = self.heads.prefix(states, positions, attend)
        return outputs
