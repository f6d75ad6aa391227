"""Reads a GGUF file's header and corrects the tokenizer that transformers builds from it."""

import math
import mmap
import struct
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers

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


class _Cursor:
    """Reads little-endian values one after another. Raises struct.error at the end of the data."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def read(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        length = self.read("Q")
        return str(self.read(f"{length}s"), "utf-8")

    def value(self, kind: int) -> Any:
        """One metadata value. For an array, only its length, so vocabularies take no memory."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.read(_SCALARS[kind])
        of, count = self.read("I"), self.read("Q")
        if of in _SCALARS:
            self.at += count * struct.calcsize(f"<{_SCALARS[of]}")
        else:
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


def read_header(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file. An array is replaced by its length.

    Raises UserError if the file is not GGUF, or is shorter than its table of tensors says (as after
    an interrupted download), and as `require_gguf`.
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


def _parse(path: Path, data: mmap.mmap) -> dict[str, Any]:
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

    end_of_data = 0
    for _ in range(tensors):
        cursor.string()
        shape = [cursor.read("Q") for _ in range(cursor.read("I"))]
        per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(cursor.read("I"))]
        offset = cursor.read("Q")
        end_of_data = max(end_of_data, offset + math.prod(shape) // per_block * block_bytes)
    alignment = metadata.get("general.alignment", 32)
    expected = math.ceil(cursor.at / alignment) * alignment + end_of_data
    if len(data) < expected:
        raise UserError(
            f"{path} is cut short: found {len(data)} bytes, its header says at least {expected}. "
            "Download it again."
        )
    return metadata


def _smollm(tokenizer: Tokenizer) -> None:
    # In training, each digit is a separate token. The GPT-2 rules that transformers assumes join
    # digits.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()


# Keyed by GGUF's name for the pre-tokenizer (`tokenizer.ggml.pre`).
_CORRECTIONS: dict[str, Callable[[Tokenizer], None]] = {"smollm": _smollm}


def correct_tokenizer(tokenizer: Any, metadata: dict[str, Any]) -> None:
    """Corrects, in place, what transformers reads wrongly from a GGUF file's tokenizer.

    Corrects the pre-tokenizer, if it is one that is known to be read wrongly, and the special
    tokens, from the ids in the file.
    """
    correct = _CORRECTIONS.get(metadata.get("tokenizer.ggml.pre", ""))
    if correct is not None:
        correct(tokenizer.backend_tokenizer)
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token_id))


def eos_ids(metadata: dict[str, Any]) -> int | list[int] | None:
    """The ids that end a text: end of text, and end of turn if the file has a separate one.

    In the forms of a transformers config: one id, a list of ids, or None if the file has none.
    """
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = sorted({metadata[key] for key in keys if key in metadata})
    if len(ids) > 1:
        return ids
    return ids[0] if ids else None
