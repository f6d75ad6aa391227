"""Attention over slots under a mask, without copies of keys and values.

The query heads that share a key head are rows of one query.

Shapes: B rows, n tokens fed per row, N query heads, K key heads, G = N / K, S slots, D head size.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from decode.model.cache.pass_size import MASK_SIZE
from decode.model.cache.slots import SlotLayer

# On a CPU, keys are padded to a multiple of this many slots. The kernel sums the slots one vector
# width at a time. With this padding, masked slots at the end do not change any partial sum.
SLOT_STEP = 16

# In a pass over more tokens than this, or with a mask that would be too large, the query heads that
# share a key head are computed one after the other. Then the mask is not repeated for each of them.
SHORT_FEED = 256

# Gets the queries [B, N, n, D] of a layer, keys and values [B, K, S, D], and the scale of scores.
Watch = Callable[[Tensor, Tensor, Tensor, float], None]

# Maps queries [B, N, n, D] and the same tokens' keys and values [B, K, n, D] to [B, N, n, D].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def equally_wide(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with zeros behind the narrower heads, on a CPU, where PyTorch stores all scores of
    an attention whose values are not as wide as its keys, as those of latent attention. Scores stay
    the same; the output has zeros behind it too, and the scale is that of the narrower queries."""
    wide = max(key.shape[3], value.shape[3])
    if query.device.type != "cpu" or key.shape[3] == value.shape[3]:
        return query, key, value

    def widened(heads: Tensor) -> Tensor:
        return heads if heads.shape[3] == wide else pad(heads, (0, wide - heads.shape[3]))

    return widened(query), widened(key), widened(value)


class AttentionMask:
    """Which slots each token of a pass may see, and the attention under it.

    visible: bool [B, 1, n, S], or [1, 1, T, S] of a list of tokens, or an additive mask of that
    shape, or None for plain causal attention among the n tokens. watch: called for each attention
    under this mask.
    """

    def __init__(
        self, visible: Tensor | None, dtype: torch.dtype, *, watch: Watch | None = None
    ) -> None:
        self.visible, self.watch = visible, watch
        self._dtype = dtype
        self._additive: Tensor | None = None
        # The masks of the kernel calls, by group: layers of the same shape have the same.
        self._forms: dict[int, Tensor] = {}
        self._parts: dict[tuple[int, int], AttentionMask] = {}

    @property
    def additive(self) -> Tensor | None:
        """The mask as it is added to scores. It is made when an attention asks for it first: some
        read `visible` only."""
        visible = self.visible
        if visible is None or visible.dtype != torch.bool:
            return visible
        if self._additive is None:  # a `cached_property` has a lock, which no graph can hold
            blocked, hidden = torch.finfo(self._dtype).min, visible.logical_not()
            zeros = torch.zeros_like(visible, dtype=self._dtype)
            self._additive = zeros.masked_fill_(hidden, blocked)
        return self._additive

    def part(self, begin: int, end: int) -> "AttentionMask":
        """The mask of tokens begin … end−1 of a list, without the watch."""
        if (begin, end) not in self._parts:
            visible = None if self.visible is None else self.visible[:, :, begin:end]
            self._parts[begin, end] = AttentionMask(visible, self._dtype)
        return self._parts[begin, end]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None = None
    ) -> Tensor:
        """query: [B, N, n, D]; key: [B, K, S, D]; value: [B, K, S, E]. Returns [B, N, n, E].

        softcap: scores are softcap · tanh(scores / softcap).
        """
        if self.watch is not None:
            self.watch(query, key, value, scale)
        if softcap is not None:
            return self._capped(query, key, value, scale, softcap)
        return self._attend(*equally_wide(query, key, value), scale)[..., : value.shape[3]]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        mask, group, fed = self.additive, query.shape[1] // key.shape[1], query.shape[2]
        if mask is None:
            return scaled_dot_product_attention(
                query, key, value, is_causal=fed > 1, scale=scale, enable_gqa=group > 1
            )
        query = query.unflatten(1, (key.shape[1], group))
        if fed > SHORT_FEED or group * mask.numel() > MASK_SIZE:
            heads = [
                scaled_dot_product_attention(x, key, value, attn_mask=mask, scale=scale)
                for x in query.unbind(2)
            ]
            return torch.stack(heads, 2).flatten(1, 2)
        # Tokens and heads are rows of one query.
        if group not in self._forms:
            # The kernel itself repeats the mask of a single token.
            self._forms[group] = mask.repeat(1, 1, group, 1) if fed > 1 else mask
        rows = query.flatten(2, 3)
        out = scaled_dot_product_attention(
            rows, key, value, attn_mask=self._forms[group], scale=scale
        )
        return out.unflatten(2, (group, fed)).flatten(1, 2)

    def _capped(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float
    ) -> Tensor:
        group, fed, slots = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
        # Tokens and heads of a group are rows of one product, so no key is copied.
        rows = query.unflatten(1, (-1, group)).flatten(2, 3)  # [B, K, G·n, D]
        scores = (rows @ key.transpose(-1, -2) * scale).unflatten(2, (group, fed))
        scores = torch.tanh(scores / softcap) * softcap  # [B, K, G, n, S]
        if self.additive is not None:
            scores = scores + self.additive[:, :, None]
        elif fed > 1:
            order = torch.arange(slots, device=key.device)
            later = order > order[:fed, None] + slots - fed
            scores = scores.masked_fill(later, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
        return (weights.flatten(2, 3) @ value).unflatten(2, (group, fed)).flatten(1, 2)


class SlotAttention:
    """Attention over the slots of one layer (an `Attend`). It writes the keys and values of the fed
    tokens to their slots first. Of a list of tokens (`RealTokens`), each row is computed alone."""

    def __init__(
        self,
        layer: SlotLayer,
        mask: AttentionMask,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> None:
        self.slots, self.mask, self._scale, self._softcap = layer, mask, scale, softcap

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = self.slots.update(key, value)
        scale = query.shape[3] ** -0.5 if self._scale is None else self._scale
        real, mask = self.slots.real, self.mask
        if real is None:
            return mask.attend(query, key, value, scale, self._softcap)
        if mask.watch is not None:
            mask.watch(real.padded(query.transpose(1, 2)).transpose(1, 2), key, value, scale)
        outputs = []
        for row in np.flatnonzero(real.counts).tolist():
            begin, end = real.bounds[row : row + 2].tolist()
            # Without a mask the rows were empty: a token sees those that are fed before it.
            seen = slice(None) if mask.visible is not None else slice(end - begin)
            keys, values = key[row : row + 1, :, seen], value[row : row + 1, :, seen]
            own = mask.part(begin, end)
            outputs.append(own.attend(query[:, :, begin:end], keys, values, scale, self._softcap))
        return torch.cat(outputs, 2)
