"""The layers of block drafters (DFlash, 2602.06036), and the mask of their training.

A layer reads a block of tokens, and the target's features of the text before the block as more keys
and values. Its tensors are those of a Qwen3 layer, so engines know them.

Shapes: B rows, n tokens, T tokens of a text, A anchors of a text, S tokens of a block, H hidden
size, N heads, G key heads, D head size.
"""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, rotate_half

from decode.base.device import to_device
from decode.model.cache.sliding_window import SlidingWindow
from decode.model.forward.attention_mask import Attend, AttentionMask
from decode.model.forward.rotations import Rotation
from heads.layers.llama_layer import Attention, init_layer

# The blocks that attend in one call. The mask has a column for each token of these blocks.
TOGETHER = 32


class BlockAttention(Attention):
    """Attention with a norm over each head of queries and keys.

    Queries are those of the block. Keys and values are those of the context and of the block.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.q_norm = LlamaRMSNorm(self.size, eps=config.rms_norm_eps)
        self.k_norm = LlamaRMSNorm(self.size, eps=config.rms_norm_eps)

    def keys_and_values(self, x: Tensor, turns: Rotation) -> tuple[Tensor, Tensor]:
        """[B, G, n, D] each, for [B, n, H]."""
        values = self.v_proj(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        keys = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.size))).transpose(1, 2)
        return _rotated(keys, turns).to(values.dtype), values

    def forward(self, x: Tensor, turns: Rotation, attend: Attend) -> Tensor:
        """Return [B, n, H] for the normed states of the block, [B, n, H]."""
        keys, values = self.keys_and_values(x, turns)
        queries = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.size))).transpose(1, 2)
        queries = _rotated(queries, turns).to(values.dtype)
        outputs: Tensor = self.o_proj(attend(queries, keys, values).transpose(1, 2).flatten(2))
        return outputs


class BlockLayer(nn.Module):
    """Attention and a feed-forward network, each with a norm before it and added to the residual
    stream. The context is not normed here: all layers read the same context.

    Packing replaces its products and norms one by one. It is no `LeanLayer`: the context needs keys
    and values without queries, so one packed product of all three would be a second copy of their
    weights."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def init_weights(self, spread: float) -> None:
        """See `init_layer`."""
        init_layer(self, spread)

    def forward(self, states: Tensor, turns: Rotation, attend: Attend) -> Tensor:
        """[B, n, H] → [B, n, H]."""
        states = states + self.self_attn(self.input_layernorm(states), turns, attend)
        update: Tensor = self.mlp(self.post_attention_layernorm(states))
        return states + update


def _rotated(heads: Tensor, turns: Rotation) -> Tensor:
    """heads: [B, N, n, D]."""
    cos, sin = (x[:, None] for x in turns)
    rotated: Tensor = heads * cos + rotate_half(heads) * sin
    return rotated


class BlockMask:
    """Which keys the tokens of many blocks may see in training (2602.06036).

    A token sees the context strictly before the anchor of its block, and all tokens of its block.
    Blocks do not see each other. `TOGETHER` blocks attend in one call. So the masks grow with the
    number of blocks, not with its square. With a window, a call gets only the context that one of
    its blocks may see.

    anchors: int64 [B, A] on the host, ascending in each row, the position of each block's first
    token. size: S. length: T. window: the window of the context, counted from each token of a
    block.
    """

    def __init__(
        self,
        anchors: Tensor,
        size: int,
        length: int,
        device: torch.device,
        dtype: torch.dtype,
        window: SlidingWindow | None = None,
    ) -> None:
        self.size = size
        # Blocks, the positions of context tokens, and the mask.
        self._parts: list[tuple[int, Tensor, AttentionMask]] = []
        for begin in range(0, anchors.shape[1], TOGETHER):
            part = anchors[:, begin : begin + TOGETHER]
            # Nobody in this part sees the context from the last anchor on.
            seen = torch.arange(min(int(part.max()), length))
            if window is not None:
                seen = seen[window.sees(part.min(), seen)]
            seen = to_device(seen, device)
            visible = part_mask(to_device(part, device), size, seen, window)
            self._parts.append((part.shape[1], seen, AttentionMask(visible[:, None], dtype)))

    def attention(self, keys: Tensor, values: Tensor) -> Attend:
        """The attention of one layer. keys, values: those of its context, [B, G, T, D]."""

        def attend(queries: Tensor, block_keys: Tensor, block_values: Tensor) -> Tensor:
            outputs: list[Tensor] = []
            begin = 0
            for blocks, seen, mask in self._parts:
                part = slice(begin, begin + blocks * self.size)
                begin = part.stop
                part_keys, part_values = (
                    torch.cat([context[:, :, seen], x[:, :, part]], 2)
                    for context, x in ((keys, block_keys), (values, block_values))
                )
                query = queries[:, :, part]
                outputs.append(mask.attend(query, part_keys, part_values, query.shape[3] ** -0.5))
            return torch.cat(outputs, 2)

        return attend


def part_mask(
    anchors: Tensor, size: int, seen: Tensor, window: SlidingWindow | None = None
) -> Tensor:
    """bool [B, A·S, n + A·S]: the keys of n context tokens and of the blocks, that each token of
    the blocks may see. anchors: int64 [B, A]. seen: int64 [n], the positions of the context."""
    rows, count = anchors.shape
    context = (seen < anchors[:, :, None]).repeat_interleave(size, 1)
    if window is not None:
        positions = anchors[:, :, None] + torch.arange(size, device=anchors.device)
        context = context & window.sees(positions.flatten(1)[:, :, None], seen)
    block = torch.arange(count, device=anchors.device).repeat_interleave(size)
    same = (block[:, None] == block).expand(rows, -1, -1)
    return torch.cat([context, same], 2)


def draw_anchors(candidates: Tensor, count: int, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Draw at most `count` of each row's candidates: positions int64 [B, A], ascending, and which
    of them are drawn, bool [B, A]. The others fill up rows with few candidates.

    candidates: bool [B, T], on the host, False at the last position. scores: float [B, T], random
    in [0, 1]. A is at least 1.
    """
    width = max(1, min(count, int(candidates.sum(1).max())))
    drawn = scores.masked_fill(~candidates, -1.0).topk(width, 1)
    # What fills up is at the last position, so it comes after the drawn ones.
    is_drawn, last = drawn.values >= 0, candidates.shape[1] - 1
    anchors = torch.where(is_drawn, drawn.indices, last).sort(1).values
    counts = is_drawn.sum(1, keepdim=True)
    return anchors, torch.arange(width) < counts
