"""The memory of this process now. `train.loop.meters.peak_memory` has its peak."""

import psutil
import torch


def resident_memory(device: str = "cpu") -> int:
    """Return the bytes of this process that are in memory now; on a GPU, those of its tensors."""
    if device != "cpu":
        return torch.cuda.memory_allocated()
    return psutil.Process().memory_info().rss
