"""Hydra++'s heads (2402.05109, section 4): Hydra's heads on an extra layer over the whole text.

Shapes: B rows, T tokens, n tokens, H hidden size.
"""

from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from decode.contexts import Contexts
from decode.drafters import DRAFTERS
from decode.sampling import Sampling
from decode.trees.growth import Growth
from heads.attending import AttendingDrafter, AttendingHeads
from heads.base import HEADS
from heads.hydra import HydraGrowth, HydraHeads, HydraOptions
from heads.layer import Attend, DraftLayer, Rotary, UnrolledAttention, layer_config


class HydraPlusOptions(HydraOptions):
    """Options of Hydra++ heads (2402.05109). The paper trains them on the target's distribution:
    set the stage's `losses` to `forward_kl: 1`."""

    type: Literal["hydra_plus"] = "hydra_plus"  # type: ignore[assignment]
    layers: int = Field(4, ge=1)
    """The number of layers of each head's MLP; four in the paper."""


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
        self.layer.init_weights(self._spread)

    def forward(self, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return [B, n, H] for features [B, n, H]. positions: int64 [B, n] or [1, n]."""
        position_embeddings = self._rotary(positions, features)
        made: Tensor = self.layer(
            features, self.input_layernorm(features), position_embeddings, attend
        )
        return made


@HEADS.register("hydra_plus")
class HydraPlusHeads(HydraHeads, AttendingHeads):
    """Heads that read the output of the prefix layer at t instead of the target's state at t.

    The prefix layer attends to all of the target's states up to t. It starts with no effect and is
    trained with the heads.
    """

    Options = HydraPlusOptions

    def __init__(
        self, options: HydraPlusOptions, model: PreTrainedModel, vocabulary: Tensor | None = None
    ) -> None:
        super().__init__(options, model, vocabulary)
        self.prefix = PrefixLayer(layer_config(model))

    @torch.no_grad()
    def init_weights(self, model: PreTrainedModel) -> None:
        super().init_weights(model)
        self.prefix.init_weights()

    def in_context(self, features: Tensor) -> Tensor:
        positions = torch.arange(features.shape[1], device=features.device)[None]
        made: Tensor = self.prefix(features.to(self.dtype), positions, UnrolledAttention())
        return made


@DRAFTERS.register("hydra_plus")
class HydraPlusDrafter(AttendingDrafter):
    """Drafts with Hydra++ heads, in any shape. The paper calibrates a static tree on a dev set."""

    heads: HydraPlusHeads

    def growth(self, contexts: Contexts, sampling: Sampling, deepest: int) -> Growth:
        self.last = self.newest(contexts)
        return HydraGrowth(self, contexts, sampling)

    def layer(self, contexts: Contexts, columns: np.ndarray, states: Tensor) -> Tensor:
        attend = self.attention(columns[:, 0], columns.shape[1])
        places = torch.as_tensor(columns, device=states.device)
        made: Tensor = self.heads.prefix(states, places, attend)
        return made
