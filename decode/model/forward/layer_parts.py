"""What a decoder layer of the lean forward consists of: its linear layers, norms and sizes."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from decode.model.forward.lean_parts import LeanNorm


@dataclass
class LayerParts:
    """What a decoder layer consists of.

    qkv: the linear layers of queries, keys and values, one or three. gate_up: gate and up, one
    linear layer or two. Norms are None where the layer has none. query_norm and key_norm are over a
    head, or over all heads. activation: the activation of the gate, as `Product.forward` takes it.
    rotates: False for layers without rotary positions. kind: the layer's type in the config.
    """

    qkv: Sequence[nn.Linear]
    out: nn.Linear
    gate_up: Sequence[nn.Linear]
    down: nn.Linear
    head_size: int
    query_heads: int
    key_heads: int
    activation: tuple[str, str]
    attention_in: LeanNorm | None = None
    attention_out: LeanNorm | None = None
    mlp_in: LeanNorm | None = None
    mlp_out: LeanNorm | None = None
    query_norm: LeanNorm | None = None
    key_norm: LeanNorm | None = None
    scale: float | None = None
    softcap: float | None = None
    rotates: bool = True
    kind: str = ""
