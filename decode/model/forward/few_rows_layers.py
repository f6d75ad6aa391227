"""Whole layers of the lean forward for a pass over few tokens: one call of C++ for all of them, or
two calls for a layer alone (`few_rows.cpp`).

A layer is run so if it has the parts of llama: RMS norms before attention and before a gated
network with SiLU, rotary positions, and biases of queries, keys and values only. A layer of heads
has no norm before attention: it gets the input of attention beside the states.
"""

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from decode.model.cache.slots import SlotLayer
from decode.model.forward import few_rows
from decode.model.forward.attention_mask import AttentionMask
from decode.model.forward.layer_parts import LayerParts
from decode.model.forward.lean_parts import LeanNorm, Packed, PackedLinear

# Of each text. With more, PyTorch's attention is quicker.
MOST_TOKENS = 128

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
    """`Pass` of few_rows.cpp."""

    _fields_ = (
        *((name, _int) for name in ("texts", "tokens", "slots", "begin_read", "begin")),
        *((name, _pointer) for name in ("cos", "sin", "mask", "first", "read")),
        *((name, _int) for name in ("rotation_text", "rotation_token", "mask_text", "mask_token")),
        *((name, _int) for name in ("read_text", "cache_text", "cache_head", "rotated")),
        *((name, _pointer) for name in ("normed", "qkv", "mixed", "gated", "between")),
    )


class FewRowsLayer(Packed):
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
        inner = sum(map(len, gates)) * outputs // 2
        half = len(gates[0]) // 2
        gate, up = gates if len(gates) == 2 else (gates[0][:half], gates[0][half:])
        blocks = [packed, out.blocks[0], gate, up, down.blocks[0]]
        norms = [parts.attention_in, parts.mlp_in, parts.query_norm, parts.key_norm]
        weights = [None if norm is None else norm.weight.detach() for norm in norms]
        tensors = [*weights, bias, *(x.data for x in blocks)]
        self._kept = tensors  # their memory lives as long as the addresses
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
        and (len(gates) == 2 or len(gates[0].blocks[0]) % 2 == 0)
    )
    return FewRowsLayer(parts, first, second, gates, last) if fits else None


class FewRowsPass:
    """One pass over few tokens.

    states: [B, n, H], the input of the first layer. layers: all of them, for the sizes of the
    scratch memory.
    """

    def __init__(self, states: Tensor, layers: Sequence[FewRowsLayer]) -> None:
        self._texts, self._tokens = states.shape[:2]
        rows = self._texts * self._tokens
        widths = map(max, zip(*(layer.widths for layer in layers), strict=True))
        self._scratch = [states.new_empty(rows, width) for width in widths]
        self._passes: dict[Any, tuple[_Pass, Any]] = {}

    @staticmethod
    def fits(
        states: Tensor,
        rotations: Iterable[tuple[Tensor, Tensor]],
        masks: Iterable[AttentionMask],
        slots: Iterable[object],
    ) -> bool:
        """Whether a pass over these states [B, n, H] can be run so."""
        return (
            states.shape[1] <= MOST_TOKENS
            and all(cos.dtype == states.dtype for cos, _ in rotations)
            and all(mask.additive is not None or states.shape[1] == 1 for mask in masks)
            and all(isinstance(layer, SlotLayer) for layer in slots)
        )

    def run(
        self,
        layer: FewRowsLayer,
        states: Tensor,
        rotation: tuple[Tensor, Tensor],
        mask: AttentionMask,
        slots: SlotLayer,
        *,
        attention: bool = True,
        mlp: bool = True,
        attention_input: Tensor | None = None,
    ) -> Tensor:
        """[B, n, H] → [B, n, H]. attention, mlp: whether the layer has these parts here.
        attention_input: [B, n, R], of a layer without a norm before attention."""
        found, result = few_rows.library(states.dtype), torch.empty_like(states)
        assert found is not None
        parts = layer.parts
        self._initialise(layer, slots, states)
        place = ctypes.addressof(self._shared(layer, rotation, mask, slots))
        keys, values = slots.keys.data_ptr(), slots.values.data_ptr()
        if attention:
            read = states if parts.attention_in is not None else attention_input
            assert read is not None
            found.layer_begins(layer.address, place, read.data_ptr(), keys, values)
            if mask.watch is not None:
                seen = slots.window.taken(slots.keys), slots.window.taken(slots.values)
                mask.watch(self._queries(layer), *seen, layer.scale)
        found.layer_ends(
            layer.address, place, states.data_ptr(), keys, values, result.data_ptr(), attention, mlp
        )
        return result

    def run_all(
        self,
        layers: Sequence[FewRowsLayer],
        states: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        masks: Sequence[AttentionMask],
        slots: Sequence[SlotLayer],
        kept: Sequence[int],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The states after all layers, in one call, and those after the layers `kept`, by their
        numbers. No mask has a watch. The other arguments are those of `run`, one for each layer."""
        found = few_rows.library(states.dtype)
        assert found is not None
        for layer, slot_layer in zip(layers, slots, strict=True):
            self._initialise(layer, slot_layer, states)
        # Two tensors in turns are enough, but for those that are kept.
        two = torch.empty_like(states), torch.empty_like(states)
        outputs = [
            torch.empty_like(states) if n in kept else two[n % 2] for n in range(len(layers))
        ]
        every = zip(layers, rotations, masks, slots, strict=True)
        found.layers(
            _addresses(layer.address for layer in layers),
            _addresses(ctypes.addressof(self._shared(*each)) for each in every),
            states.data_ptr(),
            _addresses(x.keys.data_ptr() for x in slots),
            _addresses(x.values.data_ptr() for x in slots),
            _addresses(x.data_ptr() for x in outputs),
            len(layers),
        )
        return outputs[-1], {number: outputs[number] for number in kept}

    def _initialise(self, layer: FewRowsLayer, slots: SlotLayer, states: Tensor) -> None:
        if not slots.is_initialized:
            shape = self._texts, layer.parts.key_heads, 0, layer.parts.head_size
            slots.lazy_initialization(states.new_empty(shape), states.new_empty(shape))

    def _queries(self, layer: FewRowsLayer) -> Tensor:
        """[B, N, n, D]."""
        parts = layer.parts
        heads = parts.query_heads + 2 * parts.key_heads
        used = self._scratch[1].flatten()[: self._texts * self._tokens * heads * parts.head_size]
        every = used.view(self._texts, self._tokens, heads, parts.head_size)
        return every[:, :, : parts.query_heads].transpose(1, 2)

    def _shared(
        self,
        layer: FewRowsLayer,
        rotation: tuple[Tensor, Tensor],
        mask: AttentionMask,
        slots: SlotLayer,
    ) -> _Pass:
        """What layers with this mask, rotation and place of keys share."""
        key = id(mask.additive), id(rotation[0]), slots.keys.stride()[:2]
        if key not in self._passes:
            self._passes[key] = self._made(layer, rotation, mask.additive, slots)
        return self._passes[key][0]

    def _made(
        self,
        layer: FewRowsLayer,
        rotation: tuple[Tensor, Tensor],
        mask: Tensor | None,
        slots: SlotLayer,
    ) -> tuple[_Pass, Any]:
        window = slots.window
        if mask is None:  # one token, which sees all slots
            mask = self._scratch[0].new_zeros(1, 1, 1, window.count)
        assert slots.keys.stride()[2:] == (layer.parts.head_size, 1)
        cos, sin = (x.reshape(*x.shape[:2], -1) for x in rotation)
        mask = mask if mask.stride(3) == 1 else mask.contiguous()
        first = read = None
        if window.begin is None:
            first = window.slots_on(mask.device)[1][:, 0].contiguous()
        if isinstance(window.read, Tensor):
            read = window.read.contiguous()
        kept = cos, sin, mask, first, read
        struct = _Pass(
            self._texts,
            self._tokens,
            window.count,
            0 if isinstance(window.read, Tensor) else window.read.start,
            window.begin or 0,
            *(None if x is None else x.data_ptr() for x in kept),
            _step(cos, 0),
            cos.stride(1),
            _step(mask, 0),
            mask.stride(2),
            0 if read is None else _step(read, 0),
            *slots.keys.stride()[:2],
            cos.shape[2],
            *(x.data_ptr() for x in self._scratch),
        )
        return struct, kept


def _addresses(every: Iterable[int]) -> ctypes.Array[ctypes.c_void_p]:
    each = list(every)
    return (_pointer * len(each))(*each)


def _step(x: Tensor, dimension: int) -> int:
    """The stride of a dimension. 0 if it has one entry, which is that of all texts."""
    return 0 if x.shape[dimension] == 1 else x.stride(dimension)
