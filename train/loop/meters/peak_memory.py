"""The memory that a process has used."""

import sys
from pathlib import Path

import psutil
import torch

PROCESS = Path("/proc/self")


def peak_memory(device: str | None = None) -> int:
    """The most bytes that this process has used so far (on CUDA: of tensors on the device), or
    since `restart_peak`. device: cpu or cuda. None: CUDA if there is one."""
    if _is_cuda(device):
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows
        return psutil.Process().memory_info().rss
    if (status := PROCESS / "status").exists():
        fields = dict(
            line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines()
        )
        # Not that of `getrusage`, which the kernel does not begin anew.
        if "VmHWM" in fields:
            return int(fields["VmHWM"].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def restart_peak(device: str | None = None) -> bool:
    """Begin `peak_memory` anew. False: this system cannot, so it stays that of the process."""
    if _is_cuda(device):
        torch.cuda.reset_peak_memory_stats()
        return True
    try:
        # Of Linux (proc_pid_clear_refs(5)); some containers do not allow it.
        (PROCESS / "clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True


def _is_cuda(device: str | None) -> bool:
    return torch.cuda.is_available() if device is None else device != "cpu"
