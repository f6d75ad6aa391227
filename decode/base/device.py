"""What differs between a CPU and an accelerator: copies to it, and checks that wait for it.

The host prepares work for an accelerator while that computes. It must then wait for nothing. A read
of a value waits until all work before it is done, and so does an ordinary copy to the device.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """An array or a tensor as a tensor on `device`. The host does not wait.

    PyTorch waits for the stream after a copy from pageable memory. So values for a CUDA device go
    through pinned memory. PyTorch keeps that memory until the copy is over.
    """
    # Not `as_tensor`, which takes three times as long.
    tensor: Any = torch.from_numpy(values) if type(values) is np.ndarray else values
    if device.type == "cuda" and tensor.device.type == "cpu":
        with torch.cuda.device(device):  # else the memory belongs to the current GPU, perhaps idle
            return tensor.pin_memory().to(device, non_blocking=True)
    return tensor if tensor.device == device else tensor.to(device)


def reads_are_free(device: torch.device) -> bool:
    """Whether the host reads values on this device without waiting, so that work may depend on
    them. False also in a function that Dynamo traces, which must be the same for all values."""
    return device.type == "cpu" and not torch.compiler.is_dynamo_compiling()


def dtype_name(dtype: torch.dtype) -> str:
    """The name that settings and reports use.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def surely_none(rows: Tensor) -> bool:
    """Whether none of `rows`, bool [B], is true, so that a pass over them can be skipped.

    False where a read is not free, because the check costs more than the pass.
    """
    return reads_are_free(rows.device) and not rows.any()
