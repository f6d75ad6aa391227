"""How much memory this process has used."""

import sys

import psutil
import torch


def peak_memory() -> int:
    """Most bytes this process has had in memory so far (on CUDA: on the device)."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows
        return psutil.Process().memory_info().rss
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
