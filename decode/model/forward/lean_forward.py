"""The forward of a standard decoder, straight on the slots: few and large operations.

It runs models whose layers are of the kind of llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3,
phi3, smollm3 or olmo2, and the layers of drafters. `prepare_model` reads the parts of a model and
decides whether they compute the same as transformers' forward.

Its layers are in `lean_layer`, their products and norms in `lean_parts`, the attention in
`attention_mask`.

Shapes: B rows, n tokens fed per row, S slots, H hidden size, V vocabulary.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from decode.model.cache.slots import SlotLayer
from decode.model.forward.attention_mask import (
    SLOT_STEP,
    AttentionMask,
    SlotAttention,
)
from decode.model.forward.few_rows_layers import FewRowsLayer, FewRowsPass, widest
from decode.model.forward.layer_parts import LayerParts
from decode.model.forward.lean_layer import LeanLayer
from decode.model.forward.lean_parts import LeanNorm, PackedLayer, PackedLinear
from decode.model.forward.low_rank_output import output_product
from decode.model.forward.rotations import Rotation, Rotations
from decode.model.hidden_states import FINAL


class LeanForward(PackedLayer):
    """A causal LM as embedding, `LeanLayer`s, norm and output layer.

    rotary: the model's module of rotary positions. rotary_kinds: the layer types it takes as an
    argument, empty if it takes none. softcap: the softcap of the logits. It shares the parameters
    of the model, and its products are packed, so it runs on a CPU only.

    pads: whether it computes the padding of a pass. It computes a list of tokens (`RealTokens`).
    keeps_bits: its layers and its output layer run in C++ (`CachedLM.keeps_bits`).
    skipped_attention, skipped_mlps: the layers that run without this part (`changed`).
    """

    has_our_attention, pads, reads_positions, slot_step = True, False, False, SLOT_STEP
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
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.embedding, self.rotary, self.norm = embedding, rotary, norm
        self.layers = nn.ModuleList(LeanLayer(parts) for parts in layers)
        self._rotations, self._kinds = Rotations(rotary), [str(parts.kind) for parts in layers]
        self.output = output_product(output)
        self.refresh()
        self.rotary_kinds, self.softcap = tuple(rotary_kinds), softcap

    def refresh(self) -> None:
        # Each pass reads them, and a look-up among the parts of modules is slow.
        every: list[FewRowsLayer | None] = [layer.few_rows for layer in self.layers]  # type: ignore[misc]
        self._few_rows = [layer for layer in every if layer is not None]
        self._widths = widest(self._few_rows)
        # What the C++ of the layers goes on with.
        self._read_out: tuple[LeanNorm, PackedLinear] | None = None
        norm, output = self.norm, self.output
        if (
            isinstance(output, PackedLinear)
            and output.has_blocks
            and norm.in_cpp == output.inputs[1]
        ):
            self._read_out = norm, output

    @property
    def keeps_bits(self) -> bool:
        products = (x for x in self.output.modules() if isinstance(x, PackedLinear))
        return len(self._few_rows) == len(self.layers) and all(x.has_blocks for x in products)

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

    def rotations(self, states: Tensor, positions: Tensor) -> dict[str, Rotation]:
        """By layer type; under "" if all types share one. positions: int64 [B, n]."""
        if not self.rotary_kinds:
            return {"": self._rotations.of(positions, states)}
        every = self.rotary_kinds
        return {kind: self._rotations.of(positions, states, kind) for kind in every}

    def read_out(self, states: Tensor) -> Tensor:
        """[B, n, V]: logits, for normed states."""
        return self._capped(self.output(states))

    def _capped(self, logits: Tensor) -> Tensor:
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
        """Feed tokens. Returns the logits, and the hidden states of captured layers, [B, n, H]. A
        list of tokens is one row here.

        ids: int64 [B, n]. positions: int64 [B, n] or [1, n]. masks, slots: one per layer. columns:
        int64 [B, k], the only columns of each row that get logits, [B, k, V].
        """
        real = slots[0].real
        states = self.embedding(ids)
        rotations = self.rotations(states, positions)
        kinds = self._kinds if self.rotary_kinds else [""] * len(self._kinds)
        few_rows, layers = None, self._few_rows
        if layers and FewRowsPass.fits(states, rotations.values(), set(masks), slots, real):
            few_rows = FewRowsPass(states, self._widths, real)
        whole = len(layers) == len(masks) and not (self.skipped_attention or self.skipped_mlps)
        if few_rows is not None and whole and masks[0].watch is None:
            kept = [number for number in captured_layers if number != FINAL]
            read_out = self._read_out if columns is None else None
            states, features, logits = few_rows.run_all(
                layers, rotations, kinds, masks, slots, kept, read_out
            )
            if logits is not None:
                if FINAL in captured_layers:
                    features[FINAL] = states
                return self._capped(logits), features
        else:
            turns = [rotations[kind] for kind in kinds]
            every = zip(turns, masks, slots, strict=True)
            states, features = self._one_by_one(states, [*every], few_rows, captured_layers)
        if FINAL in captured_layers:
            states = features[FINAL] = self.norm(states)
        states = columns_of(states, columns)
        logits = self.read_out(states if FINAL in captured_layers else self.norm(states))
        return logits, features

    def _one_by_one(
        self,
        states: Tensor,
        every: Sequence[tuple[Rotation, AttentionMask, SlotLayer]],
        few_rows: FewRowsPass | None,
        kept: Sequence[int],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The states after all layers, and those after the layers `kept`, by their numbers. every:
        the rotation, mask and slots of each layer."""
        features: dict[int, Tensor] = {}
        for number, (layer, (rotation, mask, slots)) in enumerate(
            zip(self.layers, every, strict=True)
        ):
            assert isinstance(layer, LeanLayer)
            parts = layer.parts
            attention, mlp = number not in self.skipped_attention, number not in self.skipped_mlps
            if few_rows is not None and layer.few_rows is not None and (attention or mlp):
                states = few_rows.run(
                    layer.few_rows, states, rotation, mask, slots, attention=attention, mlp=mlp
                )
                attention = mlp = False
            if attention:
                attend = SlotAttention(slots, mask, parts.scale, parts.softcap)
                states = layer.attention(states, rotation, attend)
            if mlp:
                states = layer.feed_forward(states)
            if number in kept:
                features[number] = states
        return states, features


def columns_of(x: Tensor, columns: Tensor | None) -> Tensor:
    """Some columns of each row of x [B, n, …], int64 [B, k]: [B, k, …]. None: all columns."""
    if columns is None:
        return x
    return x[torch.arange(len(x), device=x.device)[:, None], columns]
