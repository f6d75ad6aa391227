"""Weights of a GGUF file in the form that they have there, for products in float32.

transformers makes float32 numbers of a quantised file's codes, five to eight times as many bytes.
Here the codes are kept, in the blocks that `few_rows` reads, and a product makes the same numbers
in registers. transformers also changes the order of some rows, so each row of a weight is looked up
in the file by its numbers. Where a row is not found, or a number would differ, the weight is packed
as any other.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from decode.base.device import dtype_name
from decode.model.forward import few_rows
from decode.model.forward.few_rows import Blocks
from decode.model.forward.huge_pages import in_huge_pages

OUTPUTS = 16  # of a block
KEY = 64  # numbers of a row that find it; all of them are compared afterwards


class Form(NamedTuple):
    """bits: of a code. group: inputs that share a scale. least: whether a least number is added.
    whole: scales in float32, else in float16."""

    bits: int
    group: int
    least: bool
    whole: bool


# In the order of `OWN_FORMS` in few_rows_own_forms.h. The last one can hold all others.
FORMS = [
    Form(4, 32, False, False),  # Q4_0
    Form(4, 32, True, False),  # Q4_1
    Form(8, 32, False, False),  # Q8_0
    Form(4, 32, True, True),  # Q4_K
    Form(8, 32, True, True),  # Q5_K
    Form(8, 16, False, True),  # Q6_K
    Form(8, 16, True, True),
]
FIRST = 3  # the number of the first of them in few_rows.cpp


@dataclass(frozen=True)
class QuantisedRows:
    """Rows of a weight. codes: int8 [rows, in]. scales: float32 [rows, in / group], and so is
    `least`; without it nothing is added. A number is code · scale + least."""

    form: Form
    codes: np.ndarray
    scales: np.ndarray
    least: np.ndarray | None

    def numbers(self) -> np.ndarray:
        """float32 [rows, in], rounded as a reader of the file rounds them."""
        wide = self.codes.reshape(*self.scales.shape, -1) * self.scales[..., None]
        if self.least is not None:
            wide += self.least[..., None]
        return wide.reshape(self.codes.shape)

    def in_form(self, form: Form) -> "QuantisedRows":
        """The same numbers in the form that can hold all others."""
        if form == self.form:
            return self
        each = self.form.group // form.group
        scales = np.repeat(self.scales, each, -1)
        least = np.zeros_like(scales) if self.least is None else np.repeat(self.least, each, -1)
        return QuantisedRows(form, self.codes, scales, least)

    def blocks(self) -> Tensor:
        """uint8 [rows / 16, bytes], as few_rows_own_forms.h reads them."""
        form, rows = self.form, len(self.codes)
        dtype = np.float32 if form.whole else np.float16
        parts: list[np.ndarray] = []
        for values in (self.scales, *([] if self.least is None else [self.least])):
            by_group = values.astype(dtype).reshape(rows // OUTPUTS, OUTPUTS, -1).swapaxes(1, 2)
            parts.append(np.ascontiguousarray(by_group).view(np.uint8))
        codes = self.codes.reshape(rows // OUTPUTS, OUTPUTS, -1, form.group).transpose(0, 2, 3, 1)
        codes = codes.astype(np.uint8)
        if form.bits == 4:
            codes = codes + np.uint8(0 if form.least else 8)
            codes = codes[..., : OUTPUTS // 2] & 15 | codes[..., OUTPUTS // 2 :] << 4
        parts.append(codes.reshape(*codes.shape[:2], -1))
        return torch.from_numpy(np.concatenate(parts, -1)).flatten(1)


def unpacked_rows(blocks: Blocks) -> QuantisedRows:
    """The rows that `QuantisedRows.blocks` packed."""
    form = FORMS[blocks.form - FIRST]
    scale_bytes = OUTPUTS * (4 if form.whole else 2)
    count = 2 if form.least else 1
    group_bytes = scale_bytes * count + form.group * OUTPUTS * form.bits // 8
    data = blocks.data.numpy().reshape(blocks.count, -1, group_bytes)
    values = []
    for n in range(count):
        raw = np.ascontiguousarray(data[..., n * scale_bytes : (n + 1) * scale_bytes])
        scales = raw.view(np.float32 if form.whole else np.float16).astype(np.float32)
        values.append(scales.swapaxes(1, 2).reshape(blocks.count * OUTPUTS, -1))
    codes = data[..., count * scale_bytes :].reshape(*data.shape[:2], form.group, -1)
    if form.bits == 4:
        codes = np.concatenate([codes & 15, codes >> 4], -1) - np.uint8(0 if form.least else 8)
    by_row = codes.view(np.int8).transpose(0, 3, 1, 2).reshape(blocks.count * OUTPUTS, -1)
    return QuantisedRows(form, by_row, values[0], values[1] if form.least else None)


def _scale(raw: np.ndarray) -> tuple[np.ndarray, None]:
    return _half(raw[..., :2]), None


def _scale_and_least(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _half(raw[..., :2]), _half(raw[..., 2:4])


def _half(raw: np.ndarray) -> np.ndarray:
    """float32 [..., 1] of two bytes."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _scales_of_k(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and least numbers of Q4_K and Q5_K, 8 of each block."""
    from gguf.quants import Q4_K

    flat = raw.reshape(-1, raw.shape[-1])
    scales, least = (x.astype(np.float32) for x in Q4_K.get_scale_min(flat[:, 4:16].copy()))
    found = _half(flat[:, :2]) * scales, -(_half(flat[:, 2:4]) * least)
    return found[0].reshape(*raw.shape[:-1], 8), found[1].reshape(*raw.shape[:-1], 8)


def _scales_of_q6(raw: np.ndarray) -> tuple[np.ndarray, None]:
    codes = np.ascontiguousarray(raw[..., 192:208]).view(np.int8)
    return _half(raw[..., 208:210]) * codes.astype(np.float32), None


ONE = np.float16(1).tobytes()


@dataclass(frozen=True)
class _Type:
    """A type of GGUF. scales: of raw blocks [rows, blocks, bytes]. neutral: where the bytes of the
    scales are, and those that make each number its code."""

    form: Form
    scales: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray | None]]
    neutral: tuple[int, bytes]


_K = (0, ONE + bytes(2) + bytes([1] * 4 + [0] * 4 + [1] * 4))
TYPES = {
    "Q4_0": _Type(FORMS[0], _scale, (0, ONE)),
    "Q4_1": _Type(FORMS[1], _scale_and_least, (0, ONE + bytes(2))),
    "Q8_0": _Type(FORMS[2], _scale, (0, ONE)),
    # Of rows whose sizes no block of Q4_K or Q5_K divides, in llama.cpp. A byte holds a code.
    "Q5_0": _Type(FORMS[2], _scale, (0, ONE)),
    "Q5_1": _Type(FORMS[4], _scale_and_least, (0, ONE + bytes(2))),
    "Q4_K": _Type(FORMS[3], _scales_of_k, _K),
    "Q5_K": _Type(FORMS[4], _scales_of_k, _K),
    "Q6_K": _Type(FORMS[5], _scales_of_q6, (192, bytes([1] * 16) + ONE)),
}
# The names of all forms, by their numbers in few_rows.cpp.
NAMES = [
    *map(dtype_name, few_rows.FORMS),
    *(" or ".join(name for name, known in TYPES.items() if known.form == x) for x in FORMS[:-1]),
    *("mixed", "bfloat16, 12 bits a weight"),
]


class QuantisedFile:
    """The quantised rows of a GGUF file, found by their numbers.

    tensors: the file's, with their types: uint8 [rows, bytes], mapped into memory.
    """

    def __init__(self, tensors: Iterable[tuple[Any, np.ndarray]]) -> None:
        self.tensors = [(x, data) for x, data in tensors if x.name in TYPES and data.ndim == 2]

    @cached_property
    def _keys(self) -> list[np.ndarray]:
        """Of each tensor, the hashes of its rows."""
        from gguf import GGML_QUANT_SIZES
        from gguf.quants import dequantize

        keys = []
        for kind, data in self.tensors:
            of_block, size = GGML_QUANT_SIZES[kind]
            keys.append(_hashes(dequantize(data[:, : size * -(-KEY // of_block)], kind)))
        return keys

    @cached_property
    def _places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Hashes of all rows in order, with their tensors and their rows there."""
        every = np.concatenate([np.zeros(0, np.int64), *self._keys])
        counts = list(map(len, self._keys))
        number = np.repeat(np.arange(len(counts)), counts)
        row = np.concatenate([np.zeros(0, np.int64), *map(np.arange, counts)])
        order = np.argsort(every, kind="stable")
        return every[order], number[order], row[order]

    def rows(self, weight: np.ndarray) -> list[QuantisedRows] | None:
        """The rows of a weight, float32 [out, in], as the file has them, in parts that follow each
        other. None if the file lacks one."""
        hashes, number, row = self._places
        # A weight of another model, or one that was trained, ends at its first row.
        for part in (weight[:1], weight):
            wanted = _hashes(part)
            found = np.searchsorted(hashes, wanted)
            if (found == len(hashes)).any() or (hashes[found] != wanted).any():
                return None
        first = int(number[found[0]])
        if np.array_equal(self._keys[first], wanted):
            return [_parsed(self.tensors[first], slice(None))]
        number, row = number[found], row[found]
        ends = [*(np.flatnonzero(np.diff(number)) + 1).tolist(), len(number)]
        return [
            _parsed(self.tensors[int(number[begin])], row[begin:end])
            for begin, end in pairwise([0, *ends])
        ]


def _hashes(numbers: np.ndarray) -> np.ndarray:
    """int64 [rows]: a hash of the first numbers of each row."""
    return np.fromiter((hash(row.tobytes()) for row in numbers[:, :KEY]), np.int64, len(numbers))


def _parsed(tensor: tuple[Any, np.ndarray], rows: Any) -> QuantisedRows:
    """These rows of a tensor of the file."""
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    kind, data = tensor
    known, raw = TYPES[kind.name], np.array(data[rows])
    blocks = raw.reshape(len(raw), -1, GGML_QUANT_SIZES[kind][1])
    scales, least = known.scales(blocks)
    flat = None if least is None else least.reshape(len(raw), -1)
    begin, neutral = known.neutral
    blocks[..., begin : begin + len(neutral)] = np.frombuffer(neutral, np.uint8)
    codes = dequantize(raw, kind).astype(np.int8)
    return QuantisedRows(known.form, codes, scales.reshape(len(raw), -1), flat)


def remember_file(model: nn.Module, path: Path) -> None:
    """From now on, the weights of a model that was read from a GGUF file are packed in its form."""
    from gguf import GGUFReader

    # Not the reader's own tensors: they keep an array for each entry of the vocabulary.
    tensors = GGUFReader(str(path)).tensors
    file = QuantisedFile((x.tensor_type, x.data.view(np.ndarray)) for x in tensors)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.quantised_file = file  # type: ignore[attr-defined]


def own_blocks(weights: Sequence[Tensor]) -> Blocks | None:
    """Weights [out, in] each, one after the other, in the form of the file that they are from. None
    if they are from none, or were changed, or its form is not known here."""
    parts: list[QuantisedRows] = []
    for weight in weights:
        file = getattr(weight, "quantised_file", None)
        if file is None or weight.dtype != torch.float32:
            return None
        numbers = weight.detach().numpy()
        rows = file.rows(numbers)
        if rows is None:
            return None
        # Equal but for the sign of zeros, which no sum shows.
        if not np.array_equal(np.concatenate([x.numbers() for x in rows]), numbers):
            return None
        parts += rows
    form = parts[0].form if len({x.form for x in parts}) == 1 else FORMS[-1]
    parts = [x.in_form(form) for x in parts]
    least = [x.least for x in parts if x.least is not None]
    every = QuantisedRows(
        form,
        np.concatenate([x.codes for x in parts]),
        np.concatenate([x.scales for x in parts]),
        np.concatenate(least) if least else None,
    )
    return Blocks(in_huge_pages(every.blocks()), FIRST + FORMS.index(form))


def unpacked(blocks: Blocks, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] of packed blocks in any form but that of whole bytes."""
    if FIRST <= blocks.form < few_rows.TWELVE:
        return torch.from_numpy(unpacked_rows(blocks).numbers()).to(dtype)
    return few_rows.unpacked_blocks(blocks.data, dtype)
