"""The forward of a standard decoder, straight on the slots: few and large operations.

It runs models whose layers are of the kind of llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3,
phi3, smollm3 or olmo2, and the layers of drafters. `prepare_model` reads the parts of a model and
decides whether they compute the same as transformers' forward.

Its products and norms are in `lean_parts`. `AttentionMask.attend` is the attention. It copies no
keys and values: the query heads that share a key head are rows of one query. On a CPU, a token of a
chain also gets the same bits for any number of tokens fed with it.

Shapes: B rows, n tokens fed per row, N query heads, K key heads, G = N / K, S slots, D head size,
H hidden size.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from decode.model.cache.slots import SlotLayer, round_up_slots
from decode.model.forward.few_rows_layers import MOST_TOKENS, FewRowsPass, few_rows_layer
from decode.model.forward.lean_parts import (
    ACTIVATIONS,
    LeanNorm,
    Product,
    product,
    products_keep_bits,
)
from decode.model.hidden_states import FINAL

# On a CPU, keys are padded to a multiple of this many slots. The kernel sums the slots one vector
# width at a time. With this padding, masked slots at the end do not change any partial sum.
SLOT_STEP = 16

# Elsewhere to a multiple of this. Then many steps of a growing text have tensors of one shape.
STATIC_SLOT_STEP = 256

# Nobody drafts longer chains, and more tokens one by one would take long.
LONGEST_CHAIN = 32
# Key heads of the trial. On some CPUs one head in a hundred gets other bits.
HEADS = 16

# The kernel multiplies this many rows of a query at once. More rows go through other sums.
QUERY_ROWS = 32

# In a pass over more tokens than this, the query heads that share a key head are computed one after
# the other. Then the mask is not repeated for each of them.
SHORT_FEED = 256

# Gets the queries [B, N, n, D] of a layer, keys and values [B, K, S, D], and the scale of scores.
Watch = Callable[[Tensor, Tensor, Tensor, float], None]

# Maps queries [B, N, n, D] and the same tokens' keys and values [B, K, n, D] to [B, N, n, D].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

# cos and sin of the positions, [B, n, 1, 2, R/2] for R rotated numbers of a head. The first half of
# sin is negated.
Rotation = tuple[Tensor, Tensor]


@functools.cache
def tokens_together(group: int, size: int, dtype: torch.dtype) -> int:
    """How many tokens of a chain may be rows of one query, so that each gets the same bits as
    alone. At least 1. group: G. size: D.

    A trial on random numbers decides, because it depends on the machine's instructions.
    """
    count = min(QUERY_ROWS // group, LONGEST_CHAIN)
    if dtype == torch.float32:
        return LONGEST_CHAIN  # float32 promises equal numbers up to rounding, not equal bits
    if count < 2:
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
        if visible is not None and visible.dtype == torch.bool:
            blocked = torch.finfo(dtype).min
            hidden = visible.logical_not()
            visible = torch.zeros_like(visible, dtype=dtype).masked_fill_(hidden, blocked)
        self.additive = visible
        # The masks of the kernel calls are the same in all layers of the same shape.
        self._forms: dict[tuple[str, int, int], Tensor] = {}

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
    tokens to their slots first."""

    def __init__(
        self,
        layer: SlotLayer,
        mask: AttentionMask,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> None:
        self._layer, self._mask, self._scale, self._softcap = layer, mask, scale, softcap

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = self._layer.update(key, value)
        scale = query.shape[3] ** -0.5 if self._scale is None else self._scale
        return self._mask.attend(query, key, value, scale, self._softcap)


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


class LeanLayer(nn.Module):
    """Attention and a gated feed-forward network, each added to the residual stream.

    packed: with packed products.
    """

    def __init__(self, parts: LayerParts, *, packed: bool = True) -> None:
        super().__init__()
        self.parts = parts
        self.qkv = product(*parts.qkv, packed=packed)
        self.out, self.down = (product(x, packed=packed) for x in (parts.out, parts.down))
        self.gate_up = nn.ModuleList(product(x, packed=packed) for x in parts.gate_up)
        for name in ("attention_in", "attention_out", "mlp_in", "mlp_out"):
            setattr(self, name, getattr(parts, name))
        self.query_norm, self.key_norm = parts.query_norm, parts.key_norm
        self.few_rows = few_rows_layer(self)

    def forward(
        self,
        states: Tensor,
        rotation: Rotation | None,
        attend: Attend,
        attention_input: Tensor | None = None,
    ) -> Tensor:
        """[B, n, H] → [B, n, H]. attention_input: [B, n, R], if attention does not read the normed
        states."""
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
            rotating = _rotated(rotating, rotation)
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


def _rotated(heads: Tensor, rotation: Rotation) -> Tensor:
    """heads: [B, n, N, D]. The first R numbers of each head are rotated."""
    cos, sin = rotation
    size = 2 * cos.shape[4]
    halves = (heads if size == heads.shape[3] else heads[..., :size]).unflatten(-1, (2, -1))
    # Some models have cos and sin in float32.
    rotated = torch.addcmul(halves * cos, halves.flip(-2), sin).flatten(-2).to(heads.dtype)
    return rotated if size == heads.shape[3] else torch.cat([rotated, heads[..., size:]], -1)


def rotation_of(cos: Tensor, sin: Tensor) -> Rotation:
    """The `Rotation` for cos and sin of transformers' rotary modules, [B, n, R] each."""
    cos, sin = (x[:, :, None].unflatten(-1, (2, -1)) for x in (cos, sin))
    return cos, torch.cat([-sin[:, :, :, :1], sin[:, :, :, 1:]], 3)


class LeanForward(nn.Module):
    """A causal LM as embedding, `LeanLayer`s, norm and output layer.

    rotary: the model's module of rotary positions. rotary_kinds: the layer types it takes as an
    argument, empty if it takes none. scale: what embeddings are multiplied with. softcap: the
    softcap of the logits. It shares the parameters of the model.

    packed: for a CPU, with packed products. Else for any device: a pass is tensors in, tensors out,
    over static slots (`decode.model.cache.slots`).
    keeps_bits: see `CachedLM.keeps_bits`.
    skipped_attention, skipped_mlps: the layers that run without this part (`changed`).
    """

    has_our_attention = True
    skipped_attention: frozenset[int] = frozenset()
    skipped_mlps: frozenset[int] = frozenset()

    def __init__(
        self,
        embedding: nn.Module,
        layers: Sequence[LayerParts],
        norm: LeanNorm,
        output: nn.Linear,
        rotary: nn.Module,
        *,
        rotary_kinds: Sequence[str] = (),
        scale: float = 1.0,
        softcap: float | None = None,
        packed: bool = True,
    ) -> None:
        super().__init__()
        self.static_slots = not packed
        self.reads_positions = False
        self.slot_step = SLOT_STEP if packed else STATIC_SLOT_STEP
        self.embedding, self.rotary, self.norm = embedding, rotary, norm
        self.layers = nn.ModuleList(LeanLayer(parts, packed=packed) for parts in layers)
        self.output = product(output, packed=packed)
        self.rotary_kinds, self.scale, self.softcap = tuple(rotary_kinds), scale, softcap
        # Capped scores are sums whose order depends on the number of tokens.
        self.keeps_bits = (
            packed
            and all(parts.softcap is None for parts in layers)
            and products_keep_bits(self, LONGEST_CHAIN)
        )

    def changed(
        self, attention: Iterable[int], mlps: Iterable[int], embedding: nn.Module | None = None
    ) -> "LeanForward":
        """The same forward without the attention and the MLPs of these layers, and with another
        layer of embeddings, if there is one. Shares all other modules."""
        other = copy.copy(self)
        if embedding is not None:
            other._modules = dict(self._modules)
            other.embedding = embedding
        other.skipped_attention, other.skipped_mlps = frozenset(attention), frozenset(mlps)
        return other

    def embed(self, ids: Tensor) -> Tensor:
        """[B, n, H]: the input of the first layer, for ids int64 [B, n]."""
        states: Tensor = self.embedding(ids)
        return states if self.scale == 1.0 else states * self.scale

    def rotations(self, states: Tensor, positions: Tensor) -> dict[str, Rotation]:
        """By layer type; under "" if all types share one. positions: int64 [B, n]."""
        if not self.rotary_kinds:
            return {"": rotation_of(*self.rotary(states, positions))}
        kinds = self.rotary_kinds
        return {kind: rotation_of(*self.rotary(states, positions, kind)) for kind in kinds}

    def read_out(self, states: Tensor) -> Tensor:
        """[B, n, V]: logits, for normed states."""
        logits: Tensor = self.output(states)
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        masks: Sequence[AttentionMask],
        slots: Sequence[SlotLayer],
        columns: Tensor | None = None,
        captured_layers: Sequence[int] = (),
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        """Feed tokens. Returns the logits, and the hidden states of captured layers, [B, n, H].

        ids: int64 [B, n]. positions: int64 [B, n] or [1, n]. masks, slots: one per layer. columns:
        int64 [B, k], the only columns of each row that get logits, [B, k, V].
        """
        features: dict[int, Tensor] = {}
        states = self.embed(ids)
        rotations = self.rotations(states, positions)
        shared = rotations.get("")
        few_rows = self._few_rows(states, rotations, masks, slots)
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, LeanLayer)
            parts, mask, slot_layer = layer.parts, masks[number], slots[number]
            rotation = shared or rotations[parts.kind]
            attention, mlp = number not in self.skipped_attention, number not in self.skipped_mlps
            if few_rows is not None and layer.few_rows is not None and (attention or mlp):
                states = few_rows.run(
                    layer.few_rows, states, rotation, mask, slot_layer, attention=attention, mlp=mlp
                )
                attention = mlp = False
            if attention:
                attend = SlotAttention(slot_layer, mask, parts.scale, parts.softcap)
                states = layer.attention(states, rotation, attend)
            if mlp:
                states = layer.feed_forward(states)
            if number in captured_layers:
                features[number] = states
        if FINAL in captured_layers:
            states = features[FINAL] = self.norm(states)
            return self.read_out(columns_of(states, columns)), features
        return self.read_out(self.norm(columns_of(states, columns))), features

    def _few_rows(
        self,
        states: Tensor,
        rotations: Mapping[str, Rotation],
        masks: Sequence[AttentionMask],
        slots: Sequence[SlotLayer],
    ) -> FewRowsPass | None:
        """The pass of the layers that can be run in two calls each. None: this pass cannot."""
        layers = [x.few_rows for x in self.layers if x.few_rows is not None]
        fits = (
            layers
            and states.shape[1] <= MOST_TOKENS
            and all(cos.dtype == states.dtype for cos, _ in rotations.values())
            and all(mask.additive is not None for mask in masks)
            and all(isinstance(layer, SlotLayer) for layer in slots)
        )
        return FewRowsPass(states, layers) if fits else None  # type: ignore[arg-type]


def columns_of(x: Tensor, columns: Tensor | None) -> Tensor:
    """Some columns of each row of x [B, n, …], int64 [B, k]: [B, k, …]. None: all columns."""
    if columns is None:
        return x
    return x[torch.arange(len(x), device=x.device)[:, None], columns]
