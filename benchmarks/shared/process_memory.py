"""The memory of this process now. `train.loop.meters.peak_memory` has its peak."""

import re
from pathlib import Path

import psutil
import torch


def resident_memory(device: str = "cpu") -> int:
    """Return the bytes of this process that are in memory now; on a GPU, those of its tensors."""
    if device != "cpu":
        return torch.cuda.memory_allocated()
    return psutil.Process().memory_info().rss


def status_bytes(name: str) -> int | None:
    """The bytes that a line of /proc/self/status names. None: the system has no such line."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None
