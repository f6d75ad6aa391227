"""The memory that keys and values take, and whether the machine has it."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from decode.base.errors import MemoryShortage
from decode.model.cache_names import cache_of
from decode.model.kinds.layer_kinds import attention_sizes
from decode.model.pretrained import has_encoder, text_of

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


# By the class and the config of a model: the numbers of `slot_bytes` and of `expanded_bytes`.
_NUMBERS: dict[tuple[type, str], tuple[int, int]] = {}


def slot_bytes(model: PreTrainedModel) -> int:
    """The bytes of keys and values that slots keep of one token of one row, over all layers.

    Running states do not count: they do not grow with the text. Layers with a window count as the
    others do. The model needs no weights."""
    return _numbers(model)[0] * model.dtype.itemsize


def expanded_bytes(model: PreTrainedModel) -> int:
    """The bytes that a pass makes of each token's slots while one layer runs.

    Multi-head latent attention makes the keys and values of all heads anew in each pass, of all
    tokens so far. Other kinds read their slots as they are: 0."""
    return _numbers(model)[1] * model.dtype.itemsize


class _Attended(TorchFunctionMode):
    """Notes the most numbers that the keys and values of a layer's attention are parts of."""

    numbers = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and len(args) == 3:
            stored = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in args[1:]}
            self.numbers = max(self.numbers, sum(stored.values()) // args[1].itemsize)
        return func(*args, **(kwargs or {}))


def _numbers(model: PreTrainedModel) -> tuple[int, int]:
    kind = type(model), text_of(model.config)
    if kind not in _NUMBERS:
        _NUMBERS[kind] = _counted_numbers(model)
    return _NUMBERS[kind]


def _counted_numbers(model: PreTrainedModel) -> tuple[int, int]:
    """How many numbers a cache gets from a pass over one token, and how many `expanded_bytes`
    counts.

    No config says it of every model: multi-head latent attention keeps what its keys and values are
    made of, and some layers keep nothing. So a copy of the model is run that has shapes and no
    values. If it cannot run so, the number is that of the heads in the config."""
    config = copy.deepcopy(model.config)
    vars(config).pop("quantization_config", None)
    config._experts_implementation = "batched_mm"  # the others read which experts a token has
    ids = {"input_ids": torch.zeros(1, 1, dtype=torch.int64, device="meta")}
    attended = _Attended()
    try:
        with torch.device("meta"), torch.no_grad(), attended:
            shapes = type(model)._from_config(config).eval()
            if has_encoder(model):
                ids["decoder_input_ids"] = ids["input_ids"]
            kept: Any = cache_of(shapes(**ids, use_cache=True))
        layers = getattr(kept, "self_attention_cache", kept).layers
        found = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
        states = [x for x in found if x is not None and x.ndim == 4]
    except Exception:  # code of any library, on tensors without values
        states = []
    sizes = attention_sizes(model)
    numbers = sum(x.shape[1] * x.shape[3] for x in states)
    latent = all(x.shape[1] == 1 for x in states) and any(x.key_heads > 1 for x in sizes)
    return (
        numbers or 2 * sum(x.key_heads * x.head_size for x in sizes),
        attended.numbers if numbers and latent else 0,
    )


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
    each = slot_bytes(model) + expanded_bytes(model)
    return slots if free is None else min(slots, free // (2 * max(each * rows, 1)))


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
    most = each + expanded_bytes(model)
    needed = most * rows * slots - each * held[0] * held[1] // 2
    if free is not None and needed > free:
        whose = type(model).__name__ + (" and its drafter" if drafter_bytes else "")
        raise MemoryShortage(
            f"the keys and values of {whose} for {rows} rows of {slots:,} tokens take "
            f"{needed / 1e9:.2f} GB ({most:,} bytes per token), and {free / 1e9:.2f} GB are free; "
            "decode fewer rows together, or shorten prompts or max_new_tokens"
        )
