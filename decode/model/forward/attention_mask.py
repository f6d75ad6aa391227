"""Attention over slots under a mask, without copies of keys and values.

The query heads that share a key head are rows of one query. On a CPU, a token of a chain also gets
the same bits for any number of tokens fed with it.

Shapes: B rows, n tokens fed per row, N query heads, K key heads, G = N / K, S slots, D head size.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from decode.model.cache.real_tokens import Part
from decode.model.cache.slots import SlotLayer, round_up_slots

# On a CPU, keys are padded to a multiple of this many slots. The kernel sums the slots one vector
# width at a time. With this padding, masked slots at the end do not change any partial sum.
SLOT_STEP = 16

# Nobody drafts longer chains, and more tokens one by one would take long.
LONGEST_CHAIN = 32
# Key heads of the trial. On some CPUs one head in a hundred gets other bits.
HEADS = 16

# The kernel multiplies this many rows of a query at once. More rows go through other sums.
QUERY_ROWS = 32

# In a pass over more tokens than this, the query heads that share a key head are computed one after
# the other. Then the mask is not repeated for each of them.
SHORT_FEED = 256

# Rows whose keys and values have at most so many bytes are computed together, and copied for it.
SMALL_ROW = 2**15

# Gets the queries [B, N, n, D] of a layer, keys and values [B, K, S, D], and the scale of scores.
Watch = Callable[[Tensor, Tensor, Tensor, float], None]

# Maps queries [B, N, n, D] and the same tokens' keys and values [B, K, n, D] to [B, N, n, D].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@functools.cache
def tokens_together(group: int, size: int, dtype: torch.dtype) -> int:
    """How many tokens of a chain may be rows of one query, so that each gets the same bits as
    alone. At least 1. group: G. size: D.

    A trial on random numbers decides, because it depends on the machine's instructions.
    """
    if dtype == torch.float32:
        return LONGEST_CHAIN  # float32 promises equal numbers up to rounding, not equal bits
    if (count := min(QUERY_ROWS // group, LONGEST_CHAIN)) < 2:
        return 1
    generator = torch.Generator().manual_seed(0)
    # In inference mode, because that is where the loop runs.
    with torch.inference_mode():
        for begin in (40, 250, 1000):
            slots = round_up_slots(begin + count, SLOT_STEP)
            query, key, value = (
                torch.randn(1, heads, tokens, size, generator=generator).to(dtype)
                for heads, tokens in ((HEADS * group, count), (HEADS, slots), (HEADS, slots))
            )
            order = torch.arange(slots)
            seen = order <= begin + torch.arange(count)[:, None]
            mask = AttentionMask(seen[None, None], dtype)
            together = mask.attend(query, key, value, size**-0.5)
            for token in range(count):
                end = round_up_slots(begin + token + 1, SLOT_STEP)
                mask = AttentionMask(seen[None, None, token : token + 1, :end], dtype)
                only = query[:, :, token : token + 1]
                alone = mask.attend(only, key[:, :, :end], value[:, :, :end], size**-0.5)
                if not torch.equal(alone, together[:, :, token : token + 1]):
                    return 1
    return count


class AttentionMask:
    """Which slots each token of a pass may see, and the attention under it.

    visible: bool [B, 1, n, S], or an additive mask of that shape, or None for plain causal
    attention among the n tokens. chain: a token's result has the same bits for any number of tokens
    fed with it. This holds for 16-bit weights, and keys padded to a multiple of `SLOT_STEP`. watch:
    called before each attention under this mask.
    """

    def __init__(
        self,
        visible: Tensor | None,
        dtype: torch.dtype,
        *,
        chain: bool = False,
        watch: Watch | None = None,
    ) -> None:
        self.visible, self.chain, self.watch = visible, chain, watch
        self._dtype = dtype
        self._additive: Tensor | None = None
        # The masks of the kernel calls are the same in all layers of the same shape.
        self._forms: dict[tuple[str, int, int], Tensor] = {}
        self._of_parts: dict[Part, AttentionMask] = {}

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

    def of_part(self, part: Part) -> "AttentionMask":
        """The mask of these tokens, without the watch."""
        if part not in self._of_parts:
            if (visible := self.visible) is not None:  # one mask may be that of all rows
                visible = (visible if len(visible) == 1 else visible[part.rows])[:, :, : part.count]
            self._of_parts[part] = AttentionMask(visible, self._dtype, chain=self.chain)
        return self._of_parts[part]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None = None
    ) -> Tensor:
        """query: [B, N, n, D]; key, value: [B, K, S, D]. Returns [B, N, n, D].

        softcap: scores are softcap · tanh(scores / softcap).
        """
        if self.watch is not None:
            self.watch(query, key, value, scale)
        mask, group, fed = self.additive, query.shape[1] // key.shape[1], query.shape[2]
        if softcap is not None:
            return self._capped(query, key, value, scale, softcap)
        if mask is None:
            return scaled_dot_product_attention(
                query, key, value, is_causal=fed > 1, scale=scale, enable_gqa=group > 1
            )
        query = query.unflatten(1, (key.shape[1], group))
        if fed > SHORT_FEED:
            heads = [
                scaled_dot_product_attention(x, key, value, attn_mask=mask, scale=scale)
                for x in query.unbind(2)
            ]
            return torch.stack(heads, 2).flatten(1, 2)
        together = fed
        if self.chain and fed > 1:
            together = tokens_together(group, query.shape[4], query.dtype)
            if together == 1:
                return self._each_token_alone(query, key, value, scale)
        parts = [
            self._as_rows(query[:, :, :, begin : begin + together], begin, key, value, scale)
            for begin in range(0, fed, together)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _as_rows(
        self, query: Tensor, begin: int, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """query: [B, K, G, m, D], of the m fed tokens from `begin` on. Tokens and heads are rows of
        one query."""
        assert self.additive is not None
        group, tokens = query.shape[2:4]
        form = self._forms.get(("rows", group, begin))
        if form is None:
            form = self.additive[:, :, begin : begin + tokens]
            if tokens > 1:  # the kernel itself repeats the mask of a single token
                form = form.repeat(1, 1, group, 1)
            self._forms["rows", group, begin] = form
        out = scaled_dot_product_attention(
            query.flatten(2, 3), key, value, attn_mask=form, scale=scale
        )
        return out.unflatten(2, (group, tokens)).flatten(1, 2)

    def _each_token_alone(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query: [B, K, G, n, D]. The kernel sees n batches of one token each, so the products are
        the same for any n. Rows and key heads are one dimension, so all n batches share the keys
        without a copy."""
        assert self.additive is not None
        rows, key_heads, _, fed, _ = query.shape
        query = query.permute(3, 0, 1, 2, 4).flatten(1, 2)  # [n, B·K, G, D]
        key, value = (x.flatten(0, 1).expand(fed, -1, -1, -1) for x in (key, value))
        form = self._forms.get(("alone", key_heads, 0))
        if form is None:
            form = self.additive.expand(rows, -1, -1, -1).permute(2, 0, 1, 3)  # [n, B, 1, S]
            if rows > 1:
                form = form[:, :, None].expand(-1, -1, key_heads, -1, -1).flatten(1, 2)
            self._forms["alone", key_heads, 0] = form
        out = scaled_dot_product_attention(query, key, value, attn_mask=form, scale=scale)
        return out.unflatten(1, (rows, key_heads)).permute(1, 2, 3, 0, 4).flatten(1, 2)

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
    tokens to their slots first. Of a list (`RealTokens`), rows of as many tokens are one."""

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
        outputs = torch.empty_like(query)
        for part in real.alike if key[0].nbytes + value[0].nbytes <= SMALL_ROW else real.apart:
            own = query[0, :, part.tokens].unflatten(1, (-1, part.count)).transpose(0, 1)
            # Without a mask the rows were empty: a token sees those that are fed before it.
            seen = slice(None) if mask.visible is not None else slice(part.count)
            keys, values = (x[part.rows][:, :, seen] for x in (key, value))
            found = mask.of_part(part).attend(own, keys, values, scale, self._softcap)
            outputs[0, :, part.tokens] = found.transpose(0, 1).flatten(1, 2)
        return outputs
