"""The memory that keys and values take, and whether the machine has it."""

from pathlib import Path

import psutil
import torch
from transformers import PreTrainedModel

from decode.base.errors import MemoryShortage
from decode.model.kinds.layer_kinds import attention_sizes

# A container's limit, what it uses of it, and what of that is files that can be dropped: the entry
# of memory.stat. As the kernel writes them for cgroups, versions 2 and 1.
CONTAINERS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (
        Path("/sys/fs/cgroup/memory"),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def slot_bytes(model: PreTrainedModel) -> int:
    """The bytes of keys and values of one token of one row, over all layers, as the model's config
    states them. Running states do not count: they do not grow with the text."""
    numbers = sum(size.key_heads * size.head_size for size in attention_sizes(model))
    return 2 * numbers * model.dtype.itemsize


def free_bytes(device: torch.device) -> int | None:
    """The bytes that can still be allocated on a device. None: not known for this kind."""
    if device.type == "cpu":
        return min([int(psutil.virtual_memory().available), *_free_in_containers()])
    if device.type != "cuda":
        return None
    # PyTorch keeps freed blocks and uses them again.
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


def _free_in_containers() -> list[int]:
    """The bytes that a container leaves this process, if it is in one with a limit."""
    free = []
    for directory, limit, used, droppable in CONTAINERS:
        try:
            allowed, taken = (
                int((directory / name).read_text(encoding="utf-8")) for name in (limit, used)
            )
            lines = (directory / "memory.stat").read_text(encoding="utf-8").splitlines()
            stat = dict(line.split() for line in lines)
        except (OSError, ValueError):  # there is none, or the limit is "max"
            continue
        free.append(max(allowed - taken + int(stat.get(droppable, 0)), 0))
    return free


def affordable_slots(model: PreTrainedModel, rows: int, slots: int) -> int:
    """At most `slots`, and few enough that keys and values of `rows` rows take half of the free
    memory of the model's device. A model on several devices is not checked."""
    free = _free_bytes_of(model)
    return slots if free is None else min(slots, free // (2 * max(slot_bytes(model) * rows, 1)))


def _free_bytes_of(model: PreTrainedModel) -> int | None:
    """The free bytes of the model's device. None: not known, or it is on several devices."""
    devices = {parameter.device for parameter in model.parameters()}
    return free_bytes(devices.pop()) if len(devices) == 1 else None


def require_memory(
    model: PreTrainedModel,
    rows: int,
    slots: int,
    held: tuple[int, int] = (0, 0),
    *,
    drafter_bytes: int = 0,
) -> None:
    """Check, before any forward, that keys and values of `rows` × `slots` tokens fit into the free
    memory of the model's device.

    held: the rows and slots that are allocated now. They are copied when the memory grows, keys
    first, then values, so half of them exist twice for a moment. drafter_bytes: what the drafter
    keeps of each token there. A model on several devices is not checked. Raises MemoryShortage with
    the bytes needed.
    """
    if (rows, slots) == held:
        return
    free = _free_bytes_of(model)
    each = slot_bytes(model) + drafter_bytes
    needed = each * rows * slots - each * held[0] * held[1] // 2
    if free is not None and needed > free:
        whose = type(model).__name__ + (" and its drafter" if drafter_bytes else "")
        raise MemoryShortage(
            f"the keys and values of {whose} for {rows} rows of {slots:,} tokens take "
            f"{needed / 1e9:.2f} GB ({each:,} bytes per token), and {free / 1e9:.2f} GB are free; "
            "decode fewer rows together, or shorten prompts or max_new_tokens"
        )
