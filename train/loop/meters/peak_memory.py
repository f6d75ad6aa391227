"""The memory that a process has used."""

import sys

import psutil
import torch


def peak_memory() -> int:
    """The most bytes that this process has used so far (on CUDA: on the device)."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows
        return psutil.Process().memory_info().rss
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
