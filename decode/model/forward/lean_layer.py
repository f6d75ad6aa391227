"""One decoder layer of the lean forward: attention and a gated feed-forward network.

Shapes: B rows, n tokens fed per row, N query heads, D head size, H hidden size.
"""

import torch
from torch import Tensor, nn

from decode.model.forward.attention_mask import Attend, SlotAttention
from decode.model.forward.few_rows_layers import FewRowsPass, few_rows_layer
from decode.model.forward.layer_parts import LayerParts
from decode.model.forward.lean_parts import ACTIVATIONS, LeanNorm, PackedLinear, Product
from decode.model.forward.rotations import Rotation


class LeanLayer(nn.Module):
    """Attention and a gated feed-forward network, each added to the residual stream."""

    def __init__(self, parts: LayerParts) -> None:
        super().__init__()
        self.parts = parts
        self.qkv = PackedLinear(*parts.qkv)
        self.out, self.down = PackedLinear(parts.out), PackedLinear(parts.down)
        self.gate_up = nn.ModuleList(PackedLinear(x) for x in parts.gate_up)
        for name in ("attention_in", "attention_out", "mlp_in", "mlp_out"):
            setattr(self, name, getattr(parts, name))
        self.query_norm, self.key_norm = parts.query_norm, parts.key_norm
        self.few_rows = few_rows_layer(parts, self.qkv, self.out, self.gate_up, self.down)

    def forward(
        self,
        states: Tensor,
        rotation: Rotation | None,
        attend: Attend,
        attention_input: Tensor | None = None,
    ) -> Tensor:
        """[B, n, H] → [B, n, H]. attention_input: [B, n, R], if attention does not read the normed
        states."""
        if self.few_rows is not None and rotation is not None and isinstance(attend, SlotAttention):
            mask, slots, real = attend.mask, attend.slots, attend.slots.real
            if FewRowsPass.fits(states, [rotation], [mask], [slots], real):
                states = states.contiguous()
                read = None if attention_input is None else attention_input.contiguous()
                alone = FewRowsPass(states, self.few_rows.widths, real)
                return alone.run(self.few_rows, states, rotation, mask, slots, attention_input=read)
        return self.feed_forward(self.attention(states, rotation, attend, attention_input))

    def attention(
        self,
        states: Tensor,
        rotation: Rotation | None,
        attend: Attend,
        attention_input: Tensor | None = None,
    ) -> Tensor:
        """The states after attention was added to them. As `forward`."""
        parts = self.parts
        if attention_input is None:
            attention_input = states if parts.attention_in is None else parts.attention_in(states)
        heads = self.qkv(attention_input).unflatten(-1, (-1, parts.head_size))
        rotating, value = heads.split((parts.query_heads + parts.key_heads, parts.key_heads), 2)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = rotating.split((parts.query_heads, parts.key_heads), 2)
            normed = _normed_heads(query, self.query_norm), _normed_heads(key, self.key_norm)
            rotating = torch.cat(normed, 2)
        if rotation is not None and parts.rotates:
            rotating = rotation.rotated(rotating)
        query, key = rotating.transpose(1, 2).split((parts.query_heads, parts.key_heads), 1)
        outputs = attend(query, key, value.transpose(1, 2)).transpose(1, 2).flatten(2)
        if parts.attention_out is None:
            return self.out.combined(outputs, states, "add")
        return states + parts.attention_out(self.out(outputs))

    def feed_forward(self, states: Tensor) -> Tensor:
        """[B, n, H] → [B, n, H]: the states after the feed-forward network was added to them."""
        parts = self.parts
        normed = states if parts.mlp_in is None else parts.mlp_in(states)
        if len(self.gate_up) == 2:
            gate, up = self.gate_up
            assert isinstance(up, Product)
            gated = up.combined(normed, gate(normed, *parts.activation), "mul")
        else:
            gate_states, up_states = self.gate_up[0](normed).chunk(2, -1)
            gated = ACTIVATIONS[parts.activation](gate_states) * up_states
        if parts.mlp_out is None:
            return self.down.combined(gated, states, "add")
        return states + parts.mlp_out(self.down(gated))


def _normed_heads(heads: Tensor, norm: LeanNorm) -> Tensor:
    """heads: [B, n, N, D]. The norm is over a head, or over all heads."""
    if len(norm.weight) == heads.shape[3]:
        return norm(heads)
    return norm(heads.flatten(2)).view_as(heads)
