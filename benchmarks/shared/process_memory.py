"""The memory of this process, now and at its peak.

It imports nothing of ours unless the system does not tell the peak, so that it also runs in the
environment of another library.
"""

import re
from pathlib import Path

import psutil
import torch


def resident_memory(device: str = "cpu") -> int:
    """Return the bytes of this process that are in memory now; on a GPU, those of its tensors."""
    if device != "cpu":
        return torch.cuda.memory_allocated()
    return psutil.Process().memory_info().rss


def forget_peak(device: str = "cpu") -> None:
    """Reset the peak if the system supports it (Linux, CUDA). Else the process's peak stays."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        return
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return


def peak_resident_memory(device: str = "cpu") -> int:
    """Return the most bytes in memory since `forget_peak`; on a GPU, those of tensors.

    Linux: read from VmHWM. getrusage's figure starts at the memory of the process that started this
    one, and cannot be reset.
    """
    if device != "cpu":
        return torch.cuda.max_memory_allocated()
    peak = status_bytes("VmHWM")
    if peak is not None:
        return peak
    # Imported here, because the environment of another library lacks it.
    from train.loop.meters.peak_memory import peak_memory

    return peak_memory()


def status_bytes(name: str) -> int | None:
    """The bytes that a line of /proc/self/status names. None: the system has no such line."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None
