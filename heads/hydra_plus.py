"""Hydra++'s heads (2402.05109, section 4): Hydra's, over one more layer that reads the whole text.

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
    """heads, layers, decay: as Hydra's; the paper's heads have four layers here. It trains them on
    the target's distribution, which is the stage's `losses`: `forward_kl: 1`."""

    type: Literal["hydra_plus"] = "hydra_plus"  # type: ignore[assignment]
    layers: int = Field(4, ge=1)


class PrefixLayer(nn.Module):
    """A decoder layer after the target's last one, on the target's features."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layer = DraftLayer(config, config.hidden_size)
        self._spread = config.initializer_range
        self._rotary = Rotary(config)

    @torch.no_grad()
    def start_from(self) -> None:
        """Change nothing, at first."""
        self.input_layernorm.weight.fill_(1.0)
        self.layer.start_from(self._spread)

    def forward(self, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[B, n, H] of features [B, n, H]; positions: int64 [B, n] or [1, n]."""
        turns = self._rotary(positions, features)
        made: Tensor = self.layer(features, self.input_layernorm(features), turns, attend)
        return made


@HEADS.register("hydra_plus")
class HydraPlusHeads(HydraHeads, AttendingHeads):
    """What head k reads of the target is not its state at t but what the prefix layer makes of all
    of its states up to t. The layer changes nothing at first, and is trained with the heads."""

    Options = HydraPlusOptions

    def __init__(
        self, options: HydraPlusOptions, model: PreTrainedModel, vocabulary: Tensor | None = None
    ) -> None:
        super().__init__(options, model, vocabulary)
        self.prefix = PrefixLayer(layer_config(model))

    @torch.no_grad()
    def start_from(self, model: PreTrainedModel) -> None:
        super().start_from(model)
        self.prefix.start_from()

    def in_context(self, features: Tensor) -> Tensor:
        positions = torch.arange(features.shape[1], device=features.device)[None]
        made: Tensor = self.prefix(features.to(self.dtype), positions, UnrolledAttention())
        return made


@DRAFTERS.register("hydra_plus")
class HydraPlusDrafter(AttendingDrafter):
    """Hydra++'s heads, in any shape; the paper's is a static tree calibrated on a dev set."""

    heads: HydraPlusHeads

    def growth(self, contexts: Contexts, sampling: Sampling, deepest: int) -> Growth:
        self.last = self.newest(contexts)
        return HydraGrowth(self, contexts, sampling)

    def layer(self, contexts: Contexts, columns: np.ndarray, states: Tensor) -> Tensor:
        attend = self.attention(columns[:, 0], columns.shape[1])
        places = torch.as_tensor(columns, device=states.device)
        made: Tensor = self.heads.prefix(states, places, attend)
        return made
