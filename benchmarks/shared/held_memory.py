"""The memory of the tensors that a drafter has for itself."""

import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from decode.drafters import Drafter
from decode.model.cache.cached_model import CachedLM

CONTAINERS = (list, tuple, set, frozenset)


def held_bytes(drafter: Drafter, model: Any) -> int:
    """The bytes of all tensors and arrays that are reachable from a drafter, and not from the
    target: its model, and the model over its cache. Files that are mapped into memory do not
    count."""
    target = [
        item for item in _reachable(drafter) if type(item) is CachedLM and item.model is model
    ]
    shared = _memory([model, *target])
    return sum(size for place, size in _memory(drafter).items() if place not in shared)


def _memory(root: object) -> dict[int, int]:
    """The bytes by address of all memory of tensors and arrays that are reachable."""
    sizes = {}
    for item in _reachable(root):
        if isinstance(item, Tensor) and item.is_mkldnn:  # packed weights
            sizes[id(item)] = item.nbytes
        elif isinstance(item, Tensor):
            storage = item.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, np.ndarray) and item.base is None:
            sizes[item.ctypes.data] = item.nbytes
    return sizes


def _reachable(root: object) -> Iterator[object]:
    """All objects in the attributes, containers and methods of an object, once each."""
    seen, stack = {id(None)}, [root]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, (type, types.ModuleType, str, int, float)):
            continue
        seen.add(id(item))
        yield item
        if isinstance(item, Mapping):
            stack += item.values()
        elif isinstance(item, CONTAINERS):
            stack += item
        elif isinstance(item, types.MethodType):
            stack.append(item.__self__)
        elif isinstance(item, np.ndarray):
            stack.append(item.base)
        else:
            stack += getattr(item, "__dict__", {}).values()
            stack += [getattr(item, name, None) for name in getattr(item, "__slots__", ())]
