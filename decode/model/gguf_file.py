"""Reads the header of a GGUF file: its metadata and its table of tensors."""

import math
import mmap
import struct
from importlib.metadata import version as version_of
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from decode.base.errors import UserError
from decode.base.install_command import install_command

# Metadata value types of the format: struct codes of the fixed-size types; then strings and arrays.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
# Types of tensors whose numbers stand in the file as they are.
_PLAIN = {0: "<f4", 1: "<f2"}


class Tensor(NamedTuple):
    """Where a tensor is. shape: rows first. kind: GGUF's number of its type. at: its first byte."""

    shape: tuple[int, ...]
    kind: int
    at: int


class Header(NamedTuple):
    """metadata: by key; an array of strings is replaced by its length, so that vocabularies take no
    memory, and one of numbers is a list. tensors: by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

    def numbers(self, name: str) -> list[float]:
        """The numbers of a short tensor, such as the factors of rotary frequencies. Raises
        UserError if they are quantised."""
        tensor = self.tensors[name]
        if tensor.kind not in _PLAIN:
            raise UserError(
                f"{name} of {self.path} is of GGUF's type {tensor.kind}, expected numbers in "
                "float32 or float16. Convert the model again."
            )
        plain = _PLAIN[tensor.kind]
        return np.fromfile(self.path, plain, math.prod(tensor.shape), offset=tensor.at).tolist()


class _Cursor:
    """Reads little-endian values one after another. Raises struct.error at the end of the data."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def read(self, code: str) -> Any:
        (value,) = self.read_all(code)
        return value

    def read_all(self, code: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return values

    def string(self) -> str:
        length = self.read("Q")
        return str(self.read(f"{length}s"), "utf-8")

    def value(self, kind: int) -> Any:
        """One metadata value. For an array of strings, only its length."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.read(_SCALARS[kind])
        of, count = self.read("I"), self.read("Q")
        if of in _SCALARS:
            return [*self.read_all(f"{count}{_SCALARS[of]}")]
        for _ in range(count):
            self.value(of)
        return count


def require_gguf() -> None:
    """Raises UserError if the optional package that knows GGUF's types is not installed."""
    if find_spec("gguf") is None:
        raise UserError(
            "the package gguf, which reads GGUF files, is not installed; run "
            f"{install_command('gguf')}"
        )


def read_header(path: Path) -> Header:
    """The header of a GGUF file.

    Raises UserError if the file is not GGUF, is one part of several, has tensors of a type that the
    package gguf does not know, or is shorter than its table of tensors says (as after an
    interrupted download), and as `require_gguf`.
    """
    require_gguf()
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    # ValueError: an empty file cannot be mapped; also text that is not UTF-8.
    # KeyError: a value type that the format does not have.
    # The rest: absurd alignments, lengths and nestings.
    except (
        struct.error,
        ValueError,
        KeyError,
        TypeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise UserError(
            f"{path} is not a readable GGUF file ({error}). Download it again, or name a model "
            "directory instead."
        ) from error


def _parse(path: Path, data: mmap.mmap) -> Header:
    if data[:4] != b"GGUF":
        raise UserError(
            f"{path} is not a GGUF file: it starts with {data[:4]!r}, expected b'GGUF'. "
            "Name a GGUF file or a model directory."
        )
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    cursor = _Cursor(data)
    cursor.at = 4
    version, tensors, entries = cursor.read("I"), cursor.read("Q"), cursor.read("Q")
    if version not in (2, 3):
        raise UserError(
            f"{path} is GGUF version {version}, expected 2 or 3. Convert it with a current tool."
        )
    metadata = {}
    for _ in range(entries):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.read("I"))

    parts = metadata.get("split.count", 1)
    if parts > 1:
        raise UserError(
            f"{path} is part {metadata.get('split.no', 0) + 1} of {parts} of a model. Join the "
            "parts (llama-gguf-split --merge FIRST_PART OUT.gguf) and name the file that it writes."
        )

    table, end_of_data = [], 0
    for _ in range(tensors):
        name = cursor.string()
        shape = cursor.read_all(f"{cursor.read('I')}Q")
        kind, offset = cursor.read("I"), cursor.read("Q")
        if kind not in set(GGMLQuantizationType):
            raise UserError(
                f"{name} of {path} has a type of weights (GGUF's number {kind}) that the package "
                f"gguf {version_of('gguf')} does not know. Install a newer gguf, or name a file "
                "with another quantisation (Q4_K_M, Q8_0, F16), or the model's directory."
            )
        per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        table.append((name, shape, kind, offset))
        end_of_data = max(end_of_data, offset + math.prod(shape) // per_block * block_bytes)
    alignment = metadata.get("general.alignment", 32)
    start = math.ceil(cursor.at / alignment) * alignment
    if len(data) < start + end_of_data:
        raise UserError(
            f"{path} is cut short: found {len(data)} bytes, its header says at least "
            f"{start + end_of_data}. Download it again."
        )
    found = {name: Tensor(shape[::-1], kind, start + at) for name, shape, kind, at in table}
    return Header(path, metadata, found)


def gguf_eos_ids(metadata: dict[str, Any]) -> int | list[int] | None:
    """The ids that end a text: end of text, and end of turn or of a message if the file has them.

    In the forms of a transformers config: one id, a list of ids, or None if the file has none.
    """
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    ids = sorted({metadata[key] for key in keys if key in metadata})
    if len(ids) > 1:
        return ids
    return ids[0] if ids else None
