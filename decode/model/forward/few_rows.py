"""Products and whole layers for few rows on a CPU, in C++ (`few_rows.cpp`).

A decode step multiplies a few rows by every weight. PyTorch's products move weights at a fraction
of the memory's speed there, and a layer is thirty small operations of Python. The functions of
`few_rows.cpp` read weights at the memory's speed, run a layer in two calls, and give a row the same
bits for any number of rows.

The file is compiled when it is first needed, which takes a few seconds, and kept in the user's
cache. Without a compiler, or on a processor without AVX512-BF16, PyTorch's products stay.
"""

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from decode.base.device import cpu_flags

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-w", "-mavx2", "-mfma", "-mavx512f"),
    *("-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16"),
]
OUTPUTS = 32  # of a block of weights
NEEDED = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"}
# With these instructions PyTorch's products are quicker than ours.
BETTER = "amx_bf16"
MODES = {"none": 0, "add": 1, "mul": 2, "swish": 3}
SWITCH = "DRAFTSMITH_FEW_ROWS"


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions. None where they cannot run. `DRAFTSMITH_FEW_ROWS=0` turns them
    off."""
    if os.environ.get(SWITCH) == "0" or not _processor_fits():
        return None
    try:
        found = ctypes.CDLL(str(_compiled()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.info("no functions for few rows: %s", error)
        return None
    pointer, size, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    found.product.argtypes = [pointer] * 5 + [size] * 3 + [flag]
    found.layer_begins.argtypes = [pointer] * 5
    found.layer_ends.argtypes = [pointer] * 6 + [flag] * 2
    for function in (found.product, found.layer_begins, found.layer_ends):
        function.restype = None
    return found


def _processor_fits() -> bool:
    try:
        flags = cpu_flags()
    except OSError:
        return False
    return flags >= NEEDED and BETTER not in flags


def _compiled() -> Path:
    """The compiled file in the user's cache. Raises OSError, RuntimeError or SubprocessError if it
    cannot be made."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise OSError("there is no C++ compiler")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftsmith"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    if cache.stat().st_uid != os.getuid():
        raise OSError(f"{cache} belongs to another user")
    about = "\0".join([SOURCE.read_text(), compiler, *FLAGS])
    path = cache / f"few_rows-{hashlib.sha256(about.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            part, whole = Path(folder, "part.o"), Path(folder, "whole.so")
            # Not linked with OpenMP: its functions are those of the library that PyTorch loaded, so
            # both use the same threads.
            for command in (
                [compiler, *FLAGS, "-c", str(SOURCE), "-o", str(part)],
                [compiler, "-shared", str(part), "-o", str(whole)],
            ):
                subprocess.run(command, check=True, capture_output=True, timeout=300)
            whole.rename(path)
    return path


def fits(weights: Sequence[Tensor]) -> bool:
    """Whether `multiply` can be the product with these weights, [out, in] each."""
    first = weights[0]
    if first.dtype != torch.bfloat16 or first.device.type != "cpu" or library() is None:
        return False
    return all(len(x) % OUTPUTS == 0 and x.shape[1] % 2 == 0 for x in weights)


def packed_blocks(weight: Tensor) -> Tensor:
    """A weight [out, in] as `few_rows.cpp` reads it."""
    out, size = weight.shape
    blocks = weight.reshape(out // OUTPUTS, OUTPUTS, size // 2, 2)
    return blocks.permute(0, 2, 1, 3).contiguous()


def multiply(
    x: Tensor, packed: Tensor, bias: Tensor | None, other: Tensor | None, mode: str
) -> Tensor:
    """x · Wᵀ + b, [..., out], bfloat16. mode: what follows before the result is rounded: `add` or
    `mul` with `other`, `swish`, or `none`."""
    found = library()
    assert found is not None
    assert x.dtype == packed.dtype == torch.bfloat16
    x = x.contiguous()
    out, size = len(packed) * OUTPUTS, x.shape[-1]
    result = x.new_empty(*x.shape[:-1], out)
    if other is not None:
        other = other.expand_as(result).contiguous()
    rows = x.numel() // size
    addresses = [None if t is None else t.data_ptr() for t in (x, packed, bias, other, result)]
    found.product(*addresses, rows, size, out, MODES[mode])
    return result
