"""The memory that keys and values take, and whether the machine has it."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from decode.base.errors import MemoryShortage
from decode.model.cache.pass_size import pass_limit
from decode.model.cache_names import cache_of
from decode.model.kinds.layer_kinds import attention_sizes
from decode.model.pretrained import config_text, decoder_config, has_encoder

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


# Each score is copied as it is masked and normalised, in float32.
SCORE_BYTES = 12


@dataclass(frozen=True)
class _Numbers:
    """Of a token: `slot_bytes`, `expanded_bytes`, and queries and outputs of a latent attention, in
    numbers. scored: see `scored_heads`."""

    slot: int
    expanded: int
    queried: int
    scored: int


# By the class and the config of a model, and its attention.
_NUMBERS: dict[tuple[type, str, str, bool], _Numbers] = {}


def slot_bytes(model: PreTrainedModel) -> int:
    """The bytes of keys and values that slots keep of one token of one row, over all layers.

    Running states do not count: they do not grow with the text. Layers with a window count as the
    others do. The model needs no weights."""
    return _numbers(model).slot * model.dtype.itemsize


def expanded_bytes(model: PreTrainedModel) -> int:
    """The bytes that a pass makes of each token's slots while one layer runs.

    Multi-head latent attention makes the keys and values of all heads anew in each pass, of all
    tokens so far, and on a CPU the values once more, as wide as the keys. Other kinds read their
    slots as they are: 0."""
    return _numbers(model).expanded * model.dtype.itemsize


def scored_heads(model: PreTrainedModel) -> int:
    """The heads of a layer whose scores a pass has in memory together: those of attention that is
    computed as it is defined. 0 if a kernel makes a few scores at a time."""
    return _numbers(model).scored


def pass_bytes(model: PreTrainedModel, tokens: int, slots: int) -> int:
    """The most bytes that a pass takes beside hidden states while one layer runs, of those that
    read `tokens` of all rows in texts of `slots` slots: the mask, all scores (`scored_heads`), and
    the queries of latent attention, which are wider than hidden states."""
    numbers, size = _numbers(model), model.dtype.itemsize
    each = numbers.queried * size + slots * (1 + size + numbers.scored * SCORE_BYTES)
    return min(tokens, pass_limit(slots, numbers.scored)) * each


class _Attended(TorchFunctionMode):
    """Notes, of the layers' attention, the most numbers that the keys and values of a layer are
    parts of or are copied to, those of its queries and outputs, and the calls of kernels. own: how
    many calls have a mask for each head, narrow: how many have values of another width than keys.
    """

    numbers = queried = calls = own = narrow = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and len(args) == 3:
            stored = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in args[1:]}
            made = sum(stored.values()) // args[1].itemsize
            wide, mask = max(x.shape[3] for x in args[1:]), (kwargs or {}).get("attn_mask")
            made += sum(x[..., 0].numel() * wide for x in args[1:] if x.shape[3] < wide)
            self.numbers, self.calls = max(self.numbers, made), self.calls + 1
            # Models turn a part of the queries and join it again; outputs are brought into order.
            self.queried = max(self.queried, 2 * (args[0].numel() + args[0][..., 0].numel() * wide))
            self.own += mask is not None and mask.ndim == 4 and mask.shape[1] > 1
            self.narrow += args[1].shape[3] != args[2].shape[3]
        return func(*args, **(kwargs or {}))


def _numbers(model: PreTrainedModel) -> _Numbers:
    # Models that another library has changed have their own attention (`prepare_model`).
    theirs = getattr(model, "hf_quantizer", None) is not None and model.device.type == "cpu"
    kind = type(model), config_text(model.config), str(model.config._attn_implementation), theirs
    if kind not in _NUMBERS:
        _NUMBERS[kind] = _counted_numbers(model, theirs)
    return _NUMBERS[kind]


def _counted_numbers(model: PreTrainedModel, theirs: bool) -> _Numbers:
    """No config says them of every model: multi-head latent attention keeps what its keys and
    values are made of, and some layers keep nothing. So a copy of the model is run that has shapes
    and no values, over one token. If it cannot run so, the heads in the config are counted."""
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
            cache: Any = cache_of(shapes(**ids, use_cache=True))
        layers = getattr(cache, "self_attention_cache", cache).layers
        found = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
        states = [x for x in found if x is not None and x.ndim == 4]
    except Exception:  # code of any library, on tensors without values
        states = []
    sizes = attention_sizes(model)
    numbers = sum(x.shape[1] * x.shape[3] for x in states)
    latent = all(x.shape[1] == 1 for x in states) and any(x.key_heads > 1 for x in sizes)
    all_scores = (
        config._attn_implementation == "eager"
        or getattr(decoder_config(model), "attn_logit_softcapping", None)
        or (states and not attended.calls)
        or attended.own
        or (theirs and attended.narrow)
    )
    return _Numbers(
        numbers or 2 * sum(x.key_heads * x.head_size for x in sizes),
        attended.numbers if numbers and latent else 0,
        attended.queried if numbers and latent else 0,
        max((x.heads for x in sizes), default=0) if all_scores else 0,
    )


def free_bytes(device: torch.device) -> int | None:
    """The bytes that can still be allocated on a device. None: not known for this kind."""
    if device.type == "cpu":
        return min([int(psutil.virtual_memory().available), *_free_in_containers()])
    if device.type != "cuda":
        return None
    # PyTorch keeps freed blocks and uses them again.
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + reserved


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
    memory of the model's device, and a pass the other half at most. A model on several devices is
    not checked."""
    free = _free_bytes_of(model)
    if free is None:
        return slots
    each = slot_bytes(model) + expanded_bytes(model)
    slots = min(slots, free // (2 * max(each * rows, 1)))
    while pass_bytes(model, rows * slots, slots) > free / 2:
        slots //= 2
    return slots


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
    """Check, before any forward, that keys and values of `rows` × `slots` tokens, and what a pass
    makes beside them, fit into the free memory of the model's device.

    held: the rows and slots that are allocated now. They are copied when the memory grows, keys
    first, then values, so half of them exist twice for a moment. drafter_bytes: what the drafter
    keeps of each token there. A model on several devices is not checked. Raises MemoryShortage with
    the bytes needed.
    """
    if (rows, slots) == held:
        return
    free = _free_bytes_of(model)
    each = slot_bytes(model) + drafter_bytes
    most, beside = each + expanded_bytes(model), pass_bytes(model, rows * slots, slots)
    needed = most * rows * slots + beside - each * held[0] * held[1] // 2
    if free is not None and needed > free:
        whose = type(model).__name__ + (" and its drafter" if drafter_bytes else "")
        raise MemoryShortage(
            f"the keys and values of {whose} for {rows} rows of {slots:,} tokens take "
            f"{needed / 1e9:.2f} GB ({most:,} bytes per token, and {beside / 1e9:.2f} GB for a "
            f"pass), and {free / 1e9:.2f} GB are free; decode fewer rows together, or shorten "
            "prompts or max_new_tokens"
        )
