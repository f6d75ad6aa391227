"""Functions that all layouts of heads share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode.errors import UserError
from decode.target.loading import DTYPES, Target
from heads.heads_directory import build_heads, make_ready, read_heads
from heads.heads_drafter import HeadsDrafter
from heads.heads_module import HeadOptions, Heads, output_layer
from train.export.formats import ExportJob


def heads_of(job: ExportJob, form: str) -> Heads:
    """Return the heads to export in float32, with the modules they borrow from the target. Raises
    UserError if the target's output layer has a bias, which no layout of heads can hold."""
    target = job.target
    assert target is not None
    if output_layer(target.model).bias is not None:
        raise UserError(
            f"the output layer of {target.name} has a bias, for which format {form} has no place"
        )
    heads = read_heads(job.drafter, target)
    heads.borrow(target.model, torch.float32)
    return heads


def drafter_of(
    kind: type[HeadsDrafter],
    options: HeadOptions,
    vocabulary: Tensor | None,
    state: Mapping[str, Tensor],
    target: Target,
) -> HeadsDrafter:
    """Build a drafter from exported heads. vocabulary: token ids of a reduced draft vocabulary."""
    heads = build_heads(options, target, vocabulary, "meta")
    heads.load_state_dict(state, assign=True)
    make_ready(heads, target, target.dtype)
    return kind(heads, target.vocab_size)


def require_fit(config: Mapping[str, Any], directory: Path, target: Target) -> None:
    """Raise UserError unless the sizes in an exported config match the target's."""
    hidden = output_layer(target.model).in_features
    if (config["hidden_size"], config["vocab_size"]) != (hidden, target.vocab_size):
        raise UserError(
            f"the heads {directory} are for {config['hidden_size']} hidden numbers and "
            f"{config['vocab_size']} tokens, and the target {target.name} has {hidden} and "
            f"{target.vocab_size}; use the target they were made for"
        )


def as_stored(tensors: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Copy tensors to the CPU without shared memory. Weights get this dtype; others keep theirs."""

    def stored(tensor: Tensor) -> Tensor:
        wanted: torch.dtype = DTYPES[dtype] if tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to("cpu", wanted, copy=True).contiguous()

    return {name: stored(tensor) for name, tensor in tensors.items()}
