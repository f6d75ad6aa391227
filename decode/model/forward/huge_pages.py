"""Packed weights in memory pages of 2 MB.

A pass reads all weights in order. In pages of 4 KB that is one look-up for each 4 KB, and the
processor's prefetching stops at each page's end. Linux gives larger pages to a program that asks
for them, where `/sys/kernel/mm/transparent_hugepage/enabled` is `madvise` or `always`.
"""

import mmap
import threading
from pathlib import Path

import torch
from torch import Tensor

PAGE = 2 << 20
# Weights of a model share mappings of this size. A mapping ends with the last of its tensors.
ROOM = 64 << 20
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def has_huge_pages() -> bool:
    """Whether the system gives pages of 2 MB to a program that asks for them."""
    try:
        return hasattr(mmap, "MADV_HUGEPAGE") and "[never]" not in _ENABLED.read_text("utf-8")
    except OSError:
        return False


class _Mapping:
    """Memory that is given out from its beginning to its end."""

    def __init__(self, size: int) -> None:
        area = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        area.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(area, dtype=torch.uint8)  # it keeps the mapping
        self.free = memory[-memory.data_ptr() % PAGE :]

    def take(self, size: int) -> Tensor | None:
        if size > len(self.free):
            return None
        taken, self.free = self.free[:size], self.free[-(-size // 64) * 64 :]
        return taken


_lock = threading.Lock()
_current: list[_Mapping] = []  # that the next tensors lie in; none or one


def in_huge_pages(data: Tensor) -> Tensor:
    """A contiguous copy of a CPU tensor in pages of 2 MB, where the system has them."""
    if not has_huge_pages() or data.device.type != "cpu":
        return data.contiguous()
    with _lock:
        memory = _current[0].take(data.nbytes) if _current else None
        if memory is None:
            mapping = _Mapping(max(data.nbytes, ROOM))
            memory = mapping.take(data.nbytes)
            assert memory is not None
            _current[:] = [mapping]
    return memory.view(data.dtype).view(data.shape).copy_(data)
