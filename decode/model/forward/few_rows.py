"""Compiles and loads `few_rows.cpp`, products and layers for few rows on a CPU; packs its weights.

A decode step multiplies a few rows by every weight. PyTorch's products move weights at a fraction
of the memory's speed there, and a layer is thirty small operations of Python. The functions of
`few_rows.cpp` read weights at the memory's speed, run all layers in one call, and give a row the
same bits for any number of rows.

In float32, weights that are numbers of bfloat16, as those of most checkpoints are, are read as
such: half of the memory, and the same products. Where the processor has AVX512-VBMI2, these and
those of states in bfloat16 are read in 12 bits, with the same products too. With AMX, states in
bfloat16 are multiplied in tiles. Weights of a quantised file are read in its form
(`quantised_rows`).

The file is compiled for a dtype when that is first needed, which takes a few seconds, and kept in
the user's cache. From then on it needs no compiler. Without a compiler before that, or on a
processor that lacks the instructions, PyTorch's products stay.
"""

import ctypes
import functools
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from decode.base.processor import cpu_flags
from decode.model.forward.huge_pages import in_huge_pages

logger = logging.getLogger(__name__)

FORMS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
TWELVE = 10  # the form in 12 bits; those between are in `quantised_rows`
FUNCTIONS = "product", "norm", "peaks", "largest", "look_up", "layer", "layers"
SWITCH = "DRAFTSMITH_FEW_ROWS"
SOURCE = Path(__file__).with_suffix(".cpp")
ATTENTION = SOURCE.with_name("few_rows_attention.h")
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", "-fopenmp", "-w", "-mavx2", "-mfma"]
FLAGS += ["-mf16c"]


class Blocks:
    """Packed weights. data: [out / outputs of a block, …]. form: how they are stored, as in
    few_rows.cpp. address: of the data. count: of blocks."""

    def __init__(self, data: Tensor, form: int) -> None:
        self.data, self.form = data, form
        self.address, self.count = data.data_ptr(), len(data)

    @classmethod
    def of(cls, data: Tensor) -> "Blocks":
        """Weights whose dtype says their form."""
        return cls(in_huge_pages(data), FORMS[data.dtype])

    def __getitem__(self, part: slice) -> "Blocks":
        return Blocks(self.data[part], self.form)


@dataclass(frozen=True)
class Numbers:
    """What the functions for states in one dtype need.

    headers: the file of the dtype, and those that it includes. outputs: of a block of weights.
    needs: a processor's instructions. uses: sets of words of its description, mostly instructions;
    where it has a whole set, the compiler gets the flags.
    """

    headers: tuple[Path, ...]
    outputs: int
    needs: frozenset[str]
    flags: tuple[str, ...] = ()
    uses: tuple[dict[str, str], ...] = ()


TWELVE_USES = {"avx512vbmi": "-mavx512vbmi", "avx512_vbmi2": "-mavx512vbmi2"}
# Those of Intel read memory past the caches a third as fast.
PAST_CACHES = {"AuthenticAMD": "-DPAST_CACHES"}
TILE_USES = {"amx_tile": "-mamx-tile", "amx_bf16": "-mamx-bf16"}
NUMBERS = {
    torch.bfloat16: Numbers(
        (
            SOURCE.with_name("few_rows_bfloat16.h"),
            SOURCE.with_name("few_rows_twelve_bits.h"),
            SOURCE.with_name("few_rows_tiles.h"),
            SOURCE.with_name("few_rows_tile_attention.h"),
            ATTENTION,
        ),
        outputs=32,
        needs=frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"}),
        flags=("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16"),
        uses=(TWELVE_USES, TILE_USES, PAST_CACHES),
    ),
    torch.float32: Numbers(
        (
            SOURCE.with_name("few_rows_float32.h"),
            SOURCE.with_name("few_rows_own_forms.h"),
            SOURCE.with_name("few_rows_twelve_bits.h"),
            ATTENTION,
        ),
        outputs=16,
        needs=frozenset({"avx2", "fma", "f16c"}),
        uses=(
            {f"avx512{x}": f"-mavx512{x}" for x in ("f", "bw", "dq", "vl")},
            TWELVE_USES,
            PAST_CACHES,
        ),
    ),
}


# Why the functions for a dtype could not be compiled.
_FAILED: dict[torch.dtype, str] = {}


@functools.cache
def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The compiled functions for states in a dtype. None where they cannot run.
    `DRAFTSMITH_FEW_ROWS=0` turns them off."""
    _FAILED.pop(dtype, None)
    numbers = NUMBERS.get(dtype)
    if numbers is None or reason_against(dtype) is not None:
        return None
    try:
        found = _loaded(numbers)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        reason = f"they cannot be compiled ({error})"
        if reason not in _FAILED.values():  # another dtype said it
            logger.warning(
                "decoding on this CPU is slower than it can be: its layers in C++ are off, because "
                "%s. Install a C++ compiler, or set CXX to one, or %s=0 to decode without these "
                "layers",
                reason,
                SWITCH,
            )
        _FAILED[dtype] = reason
        return None
    pointer, size, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    found.product.argtypes = [pointer] * 5 + [size] * 3 + [flag] * 2
    found.norm.argtypes = [pointer] * 2 + [ctypes.c_float] * 2 + [pointer] + [size] * 2
    found.peaks.argtypes = [pointer] * 3 + [size] * 2
    found.largest.argtypes = [pointer] * 3 + [size] * 3
    found.look_up.argtypes = [pointer] * 2
    found.layer.argtypes = [pointer] * 7 + [flag] * 2
    found.layers.argtypes = [pointer] * 6 + [size, pointer]
    if hasattr(found, "pack_twelve_bits"):
        found.pack_twelve_bits.argtypes = [pointer] + [size] * 3 + [pointer]
        found.pack_twelve_bits.restype = size
        found.unpack_twelve_bits.argtypes = [pointer] + [size] * 2 + [pointer]
    for name in FUNCTIONS:
        getattr(found, name).restype = None
    found.read_once.argtypes, found.read_once.restype = [pointer, size], ctypes.c_float
    found.multiply_only.argtypes, found.multiply_only.restype = [size, pointer], size
    return found


def reason_against(dtype: torch.dtype) -> str | None:
    """Why the functions for states in a dtype do not run, as far as it is known: that they cannot
    be compiled is known after the first `library`. None: they run."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 turns them off"
    numbers = NUMBERS.get(dtype)
    if numbers is None:
        return f"they are not written for {str(dtype).removeprefix('torch.')}"
    if not _processor_fits(numbers):
        return "they are not for this processor"
    return _FAILED.get(dtype)


def _processor_fits(numbers: Numbers) -> bool:
    try:
        flags = cpu_flags()
    except OSError:
        return False
    return flags >= numbers.needs


def _more_flags(numbers: Numbers) -> list[str]:
    """The compiler's flags for the sets of `uses` that the processor has."""
    flags = cpu_flags()
    return [flag for uses in numbers.uses if uses.keys() <= flags for flag in uses.values()]


def _loaded(numbers: Numbers) -> ctypes.CDLL:
    """The functions from the user's cache, compiled first if it has no file that can be loaded.
    Where it cannot be written, they are compiled for this process alone.

    Raises OSError or SubprocessError if they cannot be compiled or loaded, and ValueError for an
    open quote in CXX.
    """
    flags = [*FLAGS, *numbers.flags, *_more_flags(numbers)]
    flags.append(f'-DNUMBERS="{numbers.headers[0].name}"')
    texts = [file.read_text(encoding="utf-8") for file in (SOURCE, *numbers.headers)]
    about = "\0".join([*texts, *flags])
    name = f"few_rows-{hashlib.sha256(about.encode()).hexdigest()[:16]}.so"
    cache = _cache()
    if cache is not None and (cache / name).exists():
        with suppress(OSError):  # a broken file is made again
            return ctypes.CDLL(str(cache / name))
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(compiler[0]) is None:
        raise OSError("there is no C++ compiler")
    if cache is None or not os.access(cache, os.W_OK):
        cache = None
        logger.warning(
            "layers in C++ are compiled again at each start: the cache in %s cannot be written. "
            "Set XDG_CACHE_HOME to a directory of yours",
            os.environ.get("XDG_CACHE_HOME") or "~/.cache",
        )
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        part, whole = Path(folder, "part.o"), Path(folder, "whole.so")
        # Not linked with OpenMP: its functions are those of the library that PyTorch loaded, so
        # both use the same threads.
        for arguments in (
            [*flags, "-c", str(SOURCE), "-o", str(part)],
            ["-shared", str(part), "-o", str(whole)],
        ):
            command = [*compiler, *arguments]
            ran = subprocess.run(command, capture_output=True, timeout=300, errors="replace")
            if ran.returncode:
                last = ran.stderr.strip().rpartition("\n")[2]
                raise OSError(f"{shlex.join(compiler)} ended with {ran.returncode}: {last}")
        found = ctypes.CDLL(str(whole))
        if cache is not None:
            whole.rename(cache / name)
    return found


def _cache() -> Path | None:
    """The user's directory of compiled files. None: there can be none, or it is another user's."""
    try:
        parent = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        cache = Path(parent) / "draftsmith"
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        return cache if cache.stat().st_uid == os.getuid() else None
    except (OSError, RuntimeError):  # RuntimeError: this user has no home
        return None


def fits(weights: Sequence[Tensor]) -> bool:
    """Whether the functions compute products with these weights, [out, in] each."""
    if not runs(weights[0]):
        return False
    outputs = NUMBERS[weights[0].dtype].outputs
    return all(len(x) % outputs == 0 and x.shape[1] % 2 == 0 for x in weights)


def runs(weight: Tensor) -> bool:
    """Whether there are functions for a weight of this dtype, where it is."""
    return weight.device.type == "cpu" and library(weight.dtype) is not None


def packed_blocks(weight: Tensor) -> Blocks:
    """A weight [out, in] as the functions for its dtype read it, in blocks of outputs. A weight in
    float32 becomes bfloat16 if that changes no number, and bfloat16 takes 12 bits if it can."""
    (out, size), outputs = weight.shape, NUMBERS[weight.dtype].outputs
    half = weight.bfloat16()
    if weight.dtype == torch.float32 and not torch.equal(half.float(), weight):
        return Blocks.of(weight.reshape(out // outputs, outputs, size).transpose(1, 2))
    blocks = half.reshape(out // outputs, outputs, size // 2, 2).permute(0, 2, 1, 3)
    found = _in_twelve_bits(blocks, weight.dtype)
    if found is None and weight.dtype == torch.float32:
        blocks = half.reshape(out // outputs, 2, outputs // 2, size).permute(0, 3, 2, 1)
    return found or Blocks.of(blocks)


def _in_twelve_bits(blocks: Tensor, dtype: torch.dtype) -> Blocks | None:
    """Weights in bfloat16 [blocks, in / 2, outputs, 2] in 12 bits, for states in a dtype. None if
    the processor lacks the instructions, or if the list of bytes without a code takes most of what
    that saves."""
    count, size, found = len(blocks), 2 * blocks.shape[1], library(dtype)
    words = size * blocks.shape[2]  # of a block
    if not hasattr(found, "pack_twelve_bits") or words % 128:
        return None
    assert found is not None
    blocks = blocks.contiguous()
    head = found.pack_twelve_bits(blocks.data_ptr(), count, size, 0, None)
    if head > words // 4:
        return None
    data = torch.empty(count, head + words * 3 // 2, dtype=torch.uint8)
    found.pack_twelve_bits(blocks.data_ptr(), count, size, head, data.data_ptr())
    return Blocks(in_huge_pages(data), TWELVE)


def unpacked_blocks(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] of a dtype whose data `packed_blocks` made."""
    outputs = NUMBERS[dtype].outputs
    if blocks.dtype == torch.uint8:
        found, (count, stride) = library(dtype), blocks.shape
        assert found is not None
        pairs = (stride - int(blocks[0, 16:20].view(torch.int32))) // (3 * outputs)
        words = torch.empty(count, pairs, outputs, 2, dtype=torch.bfloat16)
        found.unpack_twelve_bits(blocks.data_ptr(), count, stride, words.data_ptr())
        blocks = words
    if blocks.ndim == 3:
        return blocks.transpose(1, 2).flatten(0, 1)
    # [blocks, in, outputs / 2, 2], else [blocks, in / 2, outputs, 2].
    is_half = blocks.shape[2] < outputs
    rows = blocks.permute(0, 3, 2, 1) if is_half else blocks.transpose(1, 2)
    return rows.reshape(len(blocks) * outputs, -1).to(dtype)
