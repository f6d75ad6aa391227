"""Opens adapter directories: low-rank adapters (LoRA, 2106.09685) that make another drafter of one.

A directory has the files of peft, `adapter_config.json` and `adapter_model.safetensors`, and a
`drafter.json` with the base: its path, relative to the directory, and a hash of its weights. All
open adapters of one base share its memory.
"""

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from safetensors.torch import load_file
from torch import nn

from decode.base.artifact import CorruptArtifact, weights_sha256
from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.model.forward.low_rank import LowRank
from decode.model.loading import DTYPES, Target
from decode.model.pretrained import require_finite
from decode.model.same_target import require_same_target
from decode.shapes.static import stored_shape

KIND = "adapter"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of the names of peft
# What peft can do and `LowRank` does not, by the values that turn it off.
_OFF: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "use_rslora": (False,),
    "bias": ("none",),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
}

_Opened = WeakValueDictionary[tuple[str, str], Drafter]
# The open drafters of each target, by a hash of their weights and their dtype.
_opened: WeakKeyDictionary[nn.Module, _Opened] = WeakKeyDictionary()


def remember(drafter: Drafter, path: Path, target: Target, dtype: str) -> None:
    """Let adapters share the weights of this drafter, as long as it lives. path: its directory."""
    opened = _opened.setdefault(target.model, WeakValueDictionary())
    opened[weights_sha256(path), dtype] = drafter


def forget(drafter: Drafter, target: Target) -> None:
    """Let adapters that are opened from now on not share the weights of this drafter. They are no
    longer those of its directory."""
    opened = _opened.get(target.model, WeakValueDictionary())
    for key in [key for key, other in opened.items() if other is drafter]:
        del opened[key]


def base_of(path: Path, description: dict[str, Any]) -> Path:
    """The directory of an adapter's base. Raises UserError if there is no drafter, or one with
    other weights. description: the content of the adapter's `drafter.json`."""
    named = description["base"]
    base = (path / named["path"]).resolve()
    if not base.is_dir():
        raise UserError(
            f"the adapter {path} belongs to the drafter {base}, which does not exist; put it "
            f"there (the hash of its weights begins with {named['weights_sha256'][:12]})"
        )
    found = weights_sha256(base)
    if found != named["weights_sha256"]:
        raise UserError(
            f"the adapter {path} was trained on a drafter whose weights have the hash "
            f"{named['weights_sha256'][:12]}…, but those of {base} have {found[:12]}…; put the "
            "drafter there that it was trained on"
        )
    return base


def open_adapter(
    path: Path,
    description: dict[str, Any],
    target: Target,
    dtype: str,
    open_base: Callable[[str], Drafter],
) -> Drafter:
    """Opens an adapter on its base, which is opened only if no open drafter has its weights.

    description: the content of its `drafter.json`. open_base: opens a drafter by name. Raises
    UserError for an adapter of another target, for one whose base is not there, and as
    `read_adapter` and `decode.model.forward.low_rank.adapted`.
    """
    require_same_target(description["target"], target, f"drafter {path}", padding=True)
    key = description["base"]["weights_sha256"], dtype
    opened = _opened.get(target.model)
    base: Any = None if opened is None else opened.get(key)
    if base is None or base.learning:  # the weights of one that learns change
        base = open_base(str(base_of(path, description)))
    adapters = read_adapter(path, DTYPES[dtype])
    for adapter in adapters.values():
        adapter.to(target.device)
    drafter: Drafter = base.with_adapter(adapters)
    shape = stored_shape(path)
    return drafter if shape is None else drafter.with_shape(shape)


def read_adapter(path: Path, dtype: torch.dtype) -> dict[str, LowRank]:
    """The adapters of a directory by the names of their layers, on the CPU. Raises UserError for a
    kind of adapter that cannot be read, and for weights that are missing, NaN or infinite."""
    scale = _scale(path)
    pairs: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in load_file(path / WEIGHTS).items():
        layer, _, part = name.removeprefix(PREFIX).rpartition(".lora_")
        pairs[layer][part] = tensor.float()
    adapters = {}
    for layer, pair in pairs.items():
        if (
            set(pair) != {"A.weight", "B.weight"}
            or len(pair["A.weight"]) != pair["B.weight"].shape[1]
        ):
            raise CorruptArtifact(path, WEIGHTS, f"has no pair of low-rank weights for {layer!r}")
        first, second = pair["A.weight"], scale * pair["B.weight"]
        adapters[layer] = LowRank(first.to(dtype), second.to(dtype))
    require_finite(nn.ModuleList(adapters.values()), str(path))
    return adapters


def _scale(path: Path) -> float:
    """What the product of the two matrices is multiplied with."""
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        kind, scale = config["peft_type"], config["lora_alpha"] / config["r"]
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise CorruptArtifact(path, CONFIG, f"does not describe an adapter ({error!r})") from error
    used = [name for name, off in _OFF.items() if config.get(name, off[0]) not in off]
    if kind != "LORA" or used:
        raise UserError(
            f"the adapter {path} is of the kind {', '.join([str(kind), *used])}; expected plain "
            "LoRA, as the stages distill and heads write it"
        )
    return float(scale)
