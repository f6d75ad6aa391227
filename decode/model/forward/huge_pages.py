"""Packed weights in memory pages of 2 MB.

A pass reads all weights in order. In pages of 4 KB that is one look-up for each 4 KB, and the
processor's prefetching stops at each page's end. Linux gives larger pages to a program that asks
for them, where `/sys/kernel/mm/transparent_hugepage/enabled` is `madvise` or `always`.
"""

import functools
import mmap
import threading
from pathlib import Path

import torch
from torch import Tensor

PAGE = 2 << 20
# Weights of a model share mappings of this size. A mapping ends with the last of its tensors.
ROOM = 64 << 20
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@functools.cache
def has_huge_pages() -> bool:
    """Whether the system gives pages of 2 MB to a program that asks for them."""
    try:
        return hasattr(mmap, "MADV_HUGEPAGE") and "[never]" not in _ENABLED.read_text("utf-8")
    except OSError:
        return False


class _Mapping:
    """Memory that is given out from its beginning to its end."""

    def __init__(self, size: int) -> None:
        self.size = size + PAGE
        self.area = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.area.madvise(mmap.MADV_HUGEPAGE)
        self.used = -torch.frombuffer(self.area, dtype=torch.uint8).data_ptr() % PAGE

    def take(self, size: int) -> Tensor | None:
        """uint8 [size], a storage of its own, which keeps the mapping. None: there is no room."""
        if self.used + size > self.size:
            return None
        taken = torch.frombuffer(self.area, dtype=torch.uint8, count=size, offset=self.used)
        self.used += -(-size // 64) * 64
        return taken


_lock = threading.Lock()
_current: list[_Mapping] = []  # that the next tensors lie in; none or one


def in_huge_pages(data: Tensor) -> Tensor:
    """A contiguous copy of a CPU tensor in pages of 2 MB, where the system has them."""
    if not data.numel() or data.device.type != "cpu" or not has_huge_pages():
        return data.contiguous()
    with _lock:
        memory = _current[0].take(data.nbytes) if _current else None
        if memory is None:
            _current[:] = [_Mapping(max(data.nbytes, ROOM))]
            memory = _current[0].take(data.nbytes)
            assert memory is not None
    return memory.view(data.dtype).view(data.shape).copy_(data)
