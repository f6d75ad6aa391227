"""Whole layers of the lean forward for a pass over few tokens: one call of C++ for all of them and
the output layer, or for a layer alone (`few_rows.cpp`).

A layer is run so if it has the parts of llama: RMS norms before attention and before a gated
network with SiLU, rotary positions, and biases of queries, keys and values only. A layer of heads
has no norm before attention: it gets the input of attention beside the states.
"""

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from decode.model.cache.real_tokens import RealTokens
from decode.model.cache.slots import SlotLayer
from decode.model.forward import few_rows
from decode.model.forward.attention_mask import AttentionMask
from decode.model.forward.layer_parts import LayerParts
from decode.model.forward.lean_parts import LeanNorm, PackedLayer, PackedLinear
from decode.model.forward.rotations import Rotation

# Of each text. With more, PyTorch's attention is quicker.
MOST_TOKENS = 128
CHUNK = 512  # that of few_rows_attention.h
TOKEN = 7  # numbers of a `Token` of few_rows.cpp

_pointer, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Layer(ctypes.Structure):
    """`Layer` of few_rows.cpp."""

    _fields_ = (
        *((name, _pointer) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, _pointer) for name in ("qkv_bias", "qkv", "out", "gate", "up", "down")),
        *((name, _float) for name in ("attention_eps", "mlp_eps", "head_eps")),
        *((name, _float) for name in ("attention_offset", "mlp_offset", "head_offset", "scale")),
        *((name, ctypes.c_int32) for name in ("rotates", "qkv_form", "out_form", "gate_form")),
        *((name, ctypes.c_int32) for name in ("up_form", "down_form")),
        *((name, _int) for name in ("hidden", "inner", "query_heads", "key_heads", "head")),
        ("input", _int),
    )


class _Pass(ctypes.Structure):
    """`Pass` of few_rows.cpp. address: its own."""

    address: int
    _fields_ = (
        *((name, _int) for name in ("texts", "text", "most", "tokens", "slots", "begin_read")),
        *((name, _pointer) for name in ("starts", "counts", "cos", "sin", "turns", "mask")),
        *((name, _int) for name in ("turn_row", "turn_column", "mask_row", "mask_column")),
        *(("read", _pointer), ("read_text", _int)),
        *((name, _int) for name in ("cache_text", "cache_head", "rotated")),
        *((name, _pointer) for name in ("normed", "qkv", "mixed", "gated", "between", "parts")),
        *(("blocks", _int), ("where", _pointer), ("bounds", _pointer)),
    )


class _Output(ctypes.Structure):
    """`Output` of few_rows.cpp."""

    _fields_ = (
        *((name, _pointer) for name in ("norm", "bias", "blocks")),
        *((name, _float) for name in ("eps", "offset")),
        *((name, _int) for name in ("form", "hidden", "out")),
        *((name, _pointer) for name in ("normed", "logits")),
    )


class FewRowsLayer(PackedLayer):
    """A layer's weights, as the functions of C++ take them.

    qkv, out, down: its products. gate_up: one or two. norms: before attention, before the network,
    of queries and of keys; the last two may be None.
    """

    def __init__(
        self,
        parts: LayerParts,
        qkv: PackedLinear,
        out: PackedLinear,
        gate_up: Sequence[PackedLinear],
        down: PackedLinear,
    ) -> None:
        super().__init__()
        self.parts = parts
        # In a tuple, so that they are no parts of this module too.
        self._products = qkv, out, (*gate_up,), down
        self.refresh()

    def refresh(self) -> None:
        parts, (qkv, out, gate_up, down) = self.parts, self._products
        assert parts.mlp_in is not None
        (packed, bias), size = qkv.blocks, parts.head_size
        before = parts.attention_in
        gates = [product.blocks[0] for product in gate_up]
        dtype = parts.mlp_in.weight.dtype
        outputs = few_rows.NUMBERS[dtype].outputs
        inner = sum(gate.count for gate in gates) * outputs // 2
        half = gates[0].count // 2
        gate, up = gates if len(gates) == 2 else (gates[0][:half], gates[0][half:])
        blocks = [packed, out.blocks[0], gate, up, down.blocks[0]]
        norms = [parts.attention_in, parts.mlp_in, parts.query_norm, parts.key_norm]
        weights = [None if norm is None else norm.weight.detach() for norm in norms]
        tensors = [*weights, bias, *(x.data for x in blocks)]
        self._alive = tensors  # their memory lives as long as the addresses
        addresses = [None if x is None else x.data_ptr() for x in tensors]
        head = parts.query_norm
        hidden, every = len(parts.mlp_in.weight), parts.query_heads + 2 * parts.key_heads
        # The numbers of a row in each scratch tensor of `Pass`.
        self.widths = hidden, every * size, parts.query_heads * size, inner, hidden
        self.scale = size**-0.5 if parts.scale is None else parts.scale
        self._struct = _Layer(
            *addresses,
            0.0 if before is None else before.eps,
            parts.mlp_in.eps,
            0.0 if head is None else head.eps,
            0.0 if before is None else before.offset,
            parts.mlp_in.offset,
            0.0 if head is None else head.offset,
            self.scale,
            parts.rotates,
            *(x.form for x in blocks),
            hidden,
            inner,
            parts.query_heads,
            parts.key_heads,
            size,
            qkv.inputs[0],
        )
        self.address = ctypes.addressof(self._struct)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has addresses of its own weights.
        return {k: v for k, v in self.__dict__.items() if k not in ("_struct", "address")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.refresh()


def few_rows_layer(
    parts: LayerParts, qkv: nn.Module, out: nn.Module, gate_up: Iterable[nn.Module], down: nn.Module
) -> FewRowsLayer | None:
    """The layer of these parts with these products. None if they are others, or cannot run so."""
    every = qkv, out, *gate_up, down
    products = [x for x in every if isinstance(x, PackedLinear) and x.has_blocks]
    if len(products) < len(every):
        return None
    first, second, *gates, last = products
    norms = [parts.attention_in, parts.mlp_in, parts.query_norm, parts.key_norm]
    heads = [norm for norm in norms[2:] if norm is not None]
    size, dtype = parts.head_size, first.inputs[1]
    fits = (
        isinstance(parts.mlp_in, LeanNorm)
        and isinstance(parts.attention_in, LeanNorm | None)
        and all(x.weight.dtype == dtype for x in norms if x is not None)
        and all(len(norm.weight) == size for norm in heads)
        and len({(norm.eps, norm.offset) for norm in heads}) <= 1
        and len(heads) in (0, 2)
        and parts.attention_out is None
        and parts.mlp_out is None
        and parts.softcap is None
        and parts.activation == ("swish", "")
        and size % few_rows.NUMBERS[dtype].outputs == 0
        and all(x.blocks[1] is None for x in products[1:])
        and (len(gates) == 2 or gates[0].blocks[0].count % 2 == 0)
    )
    return FewRowsLayer(parts, first, second, gates, last) if fits else None


def widest(layers: Iterable[FewRowsLayer]) -> tuple[int, ...]:
    """The largest `widths` of some layers."""
    return tuple(map(max, zip(*[layer.widths for layer in layers], strict=True)))


class FewRowsPass:
    """One pass over few tokens. Layers with the same mask, rotation and place of keys share what
    C++ needs to know of it.

    states: [B, n, H], the input of the first layer, or [1, T, H], those of the `real` tokens only.
    widths: those of its layers, or of the `widest`, for the sizes of the scratch memory.
    """

    def __init__(
        self, states: Tensor, widths: Sequence[int], real: RealTokens | None = None
    ) -> None:
        self._states, self._real = states, real
        texts, tokens, _ = states.shape
        rows = texts * tokens
        self._most = tokens if real is None else real.width  # of a text
        *begins, end = accumulate(widths, initial=0)
        self._scratch = states.new_empty(rows, end)
        address, step = self._scratch.data_ptr(), rows * states.itemsize
        self._places = [address + step * x for x in begins]
        self._passes: dict[Any, _Pass] = {}
        self._alive: list[Any] = []  # their memory lives as long as the addresses

    @staticmethod
    def fits(
        states: Tensor,
        rotations: Iterable[Rotation],
        masks: Iterable[AttentionMask],
        slots: Iterable[object],
        real: RealTokens | None = None,
    ) -> bool:
        """Whether a pass over these states can be run so. The arguments are those of the class, and
        what its layers get."""
        tokens, dtype = states.shape[1], states.dtype
        if real is not None:
            tokens = int(real.counts.max())
        return (
            tokens <= MOST_TOKENS
            and {rotation.dtype for rotation in rotations} <= {dtype}
            # `None not in` would compare tensors with None, which takes as long as a sum of them.
            and (tokens == 1 or not any(mask.visible is None for mask in masks))
            and set(map(type, slots)) == {SlotLayer}
        )

    def run(
        self,
        layer: FewRowsLayer,
        states: Tensor,
        rotation: Rotation,
        mask: AttentionMask,
        slots: SlotLayer,
        *,
        attention: bool = True,
        mlp: bool = True,
        attention_input: Tensor | None = None,
    ) -> Tensor:
        """The states after a layer, of the same shape. attention, mlp: whether the layer has these
        parts here. attention_input: [B, n, R], of a layer without a norm before attention."""
        found, result = few_rows.library(states.dtype), torch.empty_like(states)
        assert found is not None
        (place,) = self._shared([layer], {"": rotation}, [""], [mask], [slots])
        read = states if layer.parts.attention_in is not None else attention_input
        found.layer(
            layer.address,
            place,
            states.data_ptr(),
            None if read is None else read.data_ptr(),
            *slots.addresses,
            result.data_ptr(),
            attention,
            mlp,
        )
        if attention and mask.watch is not None:
            seen = slots.fed.taken(slots.keys), slots.fed.taken(slots.values)
            mask.watch(self._queries(layer), *seen, layer.scale)
        return result

    def run_all(
        self,
        layers: Sequence[FewRowsLayer],
        rotations: Mapping[str, Rotation],
        kinds: Sequence[str],
        masks: Sequence[AttentionMask],
        slots: Sequence[SlotLayer],
        kept: Sequence[int],
        read_out: tuple[LeanNorm, PackedLinear] | None,
    ) -> tuple[Tensor, dict[int, Tensor], Tensor | None]:
        """The states after all layers, in one call, those after the layers `kept`, by their
        numbers, and the logits. kinds: which of the rotations each layer has. No mask has a watch.
        masks, slots: one for each layer. read_out: the last norm and the output layer; the states
        after all layers are normed then. None: no logits."""
        states, count = self._states, len(layers)
        found = few_rows.library(states.dtype)
        assert found is not None
        places = self._shared(layers, rotations, kinds, masks, slots)
        # Two tensors in turns are enough, but for those that are kept.
        two = torch.empty_like(states), torch.empty_like(states)
        features = {number: torch.empty_like(states) for number in kept}
        turns = [x.data_ptr() for x in two] * count
        outputs = turns[:count]
        for number, x in features.items():
            outputs[number] = x.data_ptr()
        pointers = _pointer * count
        logits, normed, output = None, None, _Output()
        if read_out is not None:
            norm, product = read_out
            blocks, bias = product.blocks
            out = blocks.count * few_rows.NUMBERS[states.dtype].outputs
            logits, normed = states.new_empty(*states.shape[:2], out), torch.empty_like(states)
            output = _Output(
                norm.weight.data_ptr(),
                None if bias is None else bias.data_ptr(),
                blocks.address,
                norm.eps,
                norm.offset,
                blocks.form,
                states.shape[2],
                out,
                normed.data_ptr(),
                logits.data_ptr(),
            )
        found.layers(
            pointers(*[layer.address for layer in layers]),
            pointers(*places),
            states.data_ptr(),
            pointers(*[x.addresses[0] for x in slots]),
            pointers(*[x.addresses[1] for x in slots]),
            pointers(*outputs),
            count,
            None if read_out is None else ctypes.byref(output),
        )
        last = count - 1
        if normed is None:
            normed = features[last] if last in features else two[last % 2]
        return normed, features, logits

    def _queries(self, layer: FewRowsLayer) -> Tensor:
        """[B, N, n, D]."""
        parts, (texts, tokens, _) = layer.parts, self._states.shape
        heads = parts.query_heads + 2 * parts.key_heads
        begin = (self._places[1] - self._places[0]) // self._scratch.itemsize
        used = self._scratch.flatten()[begin : begin + texts * tokens * heads * parts.head_size]
        every = used.view(texts, tokens, heads, parts.head_size)[:, :, : parts.query_heads]
        return (every if self._real is None else self._real.padded(every)).transpose(1, 2)

    def _shared(
        self,
        layers: Sequence[FewRowsLayer],
        rotations: Mapping[str, Rotation],
        kinds: Sequence[str],
        masks: Sequence[AttentionMask],
        slots: Sequence[SlotLayer],
    ) -> list[int]:
        """The address of the `_Pass` of each layer. Its slots have memory from now on."""
        places, place = list[int](), 0
        last: Any = None
        for layer, mask, kind, slot in zip(layers, masks, kinds, slots, strict=True):
            if not slot.is_initialized:
                shape = 1, layer.parts.key_heads, 0, layer.parts.head_size
                nothing = self._states.new_empty(shape)
                slot.lazy_initialization(nothing, nothing)
            key = mask, kind, slot.strides
            if key != last:  # most layers are alike
                if key not in self._passes:
                    self._passes[key] = self._made(layer, rotations[kind], mask.visible, slot)
                last, place = key, self._passes[key].address
            places += (place,)
        return places

    def _made(
        self,
        layer: FewRowsLayer,
        rotation: Rotation,
        mask: Tensor | None,
        slots: SlotLayer,
    ) -> _Pass:
        fed, real, (cos, sin, turns) = slots.fed, self._real, rotation.tables
        tokens, most = self._states.shape[0] * self._states.shape[1], self._most
        assert slots.strides[2:] == (layer.parts.head_size, 1)
        normed, qkv, mixed, gated, between = self._places
        turn_row, turn_column = turns.stride()
        made = _Pass(
            texts=len(fed.starts),
            text=fed.rows.start,
            most=most,
            tokens=tokens,
            slots=fed.count,
            starts=torch.from_numpy(fed.starts).data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            turns=turns.data_ptr(),
            turn_row=turn_row if turns.shape[0] > 1 else 0,  # one is that of all texts
            turn_column=turn_column,
            cache_text=slots.strides[0],
            cache_head=slots.strides[1],
            rotated=cos.shape[1],
            normed=normed,
            qkv=qkv,
            mixed=mixed,
            gated=gated,
            between=between,
        )
        self._alive += cos, sin, turns, fed.starts
        if real is not None:
            counts = np.ascontiguousarray(real.counts, dtype=np.int64)
            made.counts = torch.from_numpy(counts).data_ptr()
            self._alive.append(counts)
        if mask is not None:
            row, _, made.mask_column, together = mask.stride()
            if together != 1:
                mask = mask.contiguous()
                row, _, made.mask_column, _ = mask.stride()
            made.mask, made.mask_row = mask.data_ptr(), row if mask.shape[0] > 1 else 0
            self._alive.append(mask)
        if isinstance(fed.read, slice):
            made.begin_read = fed.read.start
        else:
            read = fed.read.contiguous()
            made.read_text = read.stride(0)
            made.read = read.data_ptr() - made.text * read.stride(0) * read.itemsize
            self._alive.append(read)
        chunks = -(-(made.begin_read % CHUNK + made.slots) // CHUNK)
        if chunks > 1:
            of_row = layer.parts.query_heads * chunks * (layer.parts.head_size + 2)
            parts = torch.empty(tokens * of_row, dtype=torch.float32)
            made.parts = parts.data_ptr()
            self._alive.append(parts)
        made.address = ctypes.addressof(made)
        found = few_rows.library(self._states.dtype)
        assert found is not None
        memory = torch.empty(tokens * (TOKEN + 1 + most) + 1, dtype=torch.int64)
        self._alive.append(memory)
        found.look_up(made.address, memory.data_ptr())
        return made
